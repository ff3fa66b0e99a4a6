// A process that is about to come to the end of its descriptors.

#pragma once

#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "base/error.h"
#include "memory/file_descriptor.h"

namespace pydist::testing {

// For as long as it lives, this process can have only so many more descriptors.
class FewDescriptors {
 public:
  explicit FewDescriptors(int left) {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &usual_), 0);
    int highest = -1;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      highest = std::max(highest, std::stoi(entry.path().filename()));
    }
    // No number below the last one is free then.
    do {
      taken_.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      PYDIST_CHECK(taken_.back());
    } while (taken_.back().get() < highest);
    const rlimit few{static_cast<rlim_t>(taken_.back().get() + 1 + left), usual_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  }
  FewDescriptors(const FewDescriptors&) = delete;
  FewDescriptors& operator=(const FewDescriptors&) = delete;
  ~FewDescriptors() { EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &usual_), 0); }

 private:
  rlimit usual_{};
  std::vector<FileDescriptor> taken_;
};

}  // namespace pydist::testing
