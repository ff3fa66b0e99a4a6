// A dense run of elements that somebody else owns.

#pragma once

#include <cstddef>
#include <cstdint>

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

}  // namespace pydist
