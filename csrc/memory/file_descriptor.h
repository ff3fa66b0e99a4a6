// A file descriptor that closes itself.

#pragma once

#include <unistd.h>

#include <utility>

namespace pydist {

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int value) noexcept : value_(value) {}
  FileDescriptor(FileDescriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  ~FileDescriptor() {
    if (value_ >= 0) {
      ::close(value_);
    }
  }

  [[nodiscard]] int get() const noexcept { return value_; }
  [[nodiscard]] explicit operator bool() const noexcept { return value_ >= 0; }

 private:
  int value_ = -1;
};

}  // namespace pydist
