// A folder with the files of cgroups, for tests of what reads them.

#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace pydist::testing {

class CgroupTree {
 public:
  CgroupTree() = default;
  CgroupTree(const CgroupTree&) = delete;
  CgroupTree& operator=(const CgroupTree&) = delete;
  ~CgroupTree() { std::filesystem::remove_all(root_); }

  // A file, below the folder; replaces what is there.
  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << '\n';
  }
  [[nodiscard]] std::string path(const std::string& below = "") const {
    return (root_ / below).string();
  }

 private:
  const std::filesystem::path root_ = std::filesystem::path(::testing::TempDir()) /
                                      ("pydist-cgroups-" + std::to_string(::getpid()));
};

}  // namespace pydist::testing
