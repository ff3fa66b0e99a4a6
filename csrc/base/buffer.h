// A dense run of elements that somebody else owns.

#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "base/dtype.h"

namespace pydist {

enum class DeviceType : std::uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

struct Buffer {
  void* data = nullptr;
  std::size_t count = 0;  // elements
  DType dtype = DType::kFloat32;
  Device device = {};

  [[nodiscard]] std::size_t bytes() const noexcept { return count * element_size(dtype); }
};

// Several buffers. The usual one lies in the object itself: a small collective takes less time than
// an allocation and its end.
class Buffers {
 public:
  Buffers() = default;
  Buffers(std::initializer_list<Buffer> buffers) { *this = buffers; }
  Buffers(std::vector<Buffer> buffers)  // NOLINT(*-explicit-*): a list by another name
      : several_(std::make_unique<std::vector<Buffer>>(std::move(buffers))) {}
  Buffers(const Buffers& other)
      : one_(other.one_), has_one_(other.has_one_), several_(copy(other.several_)) {}
  Buffers(Buffers&& other) noexcept = default;
  Buffers& operator=(const Buffers& other) {
    if (this != &other) {
      one_ = other.one_;
      has_one_ = other.has_one_;
      several_ = copy(other.several_);
    }
    return *this;
  }
  Buffers& operator=(Buffers&& other) noexcept = default;
  Buffers& operator=(std::initializer_list<Buffer> buffers) {
    has_one_ = buffers.size() == 1;
    several_.reset();
    if (has_one_) {
      one_ = *buffers.begin();
    } else {
      several_ = std::make_unique<std::vector<Buffer>>(buffers);
    }
    return *this;
  }
  ~Buffers() = default;

  [[nodiscard]] bool empty() const noexcept { return size() == 0; }
  [[nodiscard]] std::size_t size() const noexcept {
    return several_ == nullptr ? (has_one_ ? 1 : 0) : several_->size();
  }
  [[nodiscard]] const Buffer* data() const noexcept {
    return several_ == nullptr ? &one_ : several_->data();
  }
  [[nodiscard]] Buffer* data() noexcept { return several_ == nullptr ? &one_ : several_->data(); }
  [[nodiscard]] const Buffer& operator[](std::size_t index) const noexcept { return data()[index]; }
  [[nodiscard]] Buffer& operator[](std::size_t index) noexcept { return data()[index]; }
  [[nodiscard]] const Buffer* begin() const noexcept { return data(); }
  [[nodiscard]] const Buffer* end() const noexcept { return data() + size(); }
  [[nodiscard]] Buffer* begin() noexcept { return data(); }
  [[nodiscard]] Buffer* end() noexcept { return data() + size(); }

  void clear() noexcept {
    has_one_ = false;
    several_.reset();
  }
  void push_back(const Buffer& buffer) {
    if (several_ != nullptr) {
      several_->push_back(buffer);
    } else if (has_one_) {
      several_ = std::make_unique<std::vector<Buffer>>(std::vector<Buffer>{one_, buffer});
    } else {
      one_ = buffer;
      has_one_ = true;
    }
  }

 private:
  using Several = std::unique_ptr<std::vector<Buffer>>;

  static Several copy(const Several& several) {
    return several == nullptr ? nullptr : std::make_unique<std::vector<Buffer>>(*several);
  }

  Buffer one_;
  bool has_one_ = false;
  Several several_;  // where it is not null, one_ does not count
};

}  // namespace pydist
