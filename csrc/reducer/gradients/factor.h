// By what gradients are multiplied, where backwards have weights: a number that the host knows, or
// one that a device computes, so that the host never waits for it.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>

namespace pydist {

// A number that a device computes.
class DeviceNumber {
 public:
  // Of float64, without dimensions: what the current stream of its device has been told to compute.
  explicit DeviceNumber(at::Tensor value);

  // For the current stream, which waits for the one that computes it.
  [[nodiscard]] const at::Tensor& here() const;

 private:
  at::Tensor value_;
  c10::Stream stream_;
};

struct Factor {
  double number = 1.0;
  std::optional<DeviceNumber> on_device;  // a further factor

  // The product of both. Waits for the device.
  [[nodiscard]] double read() const;
};

// `gradient` times the factor, rounded once to the gradient's type. A factor of zero makes zeros,
// whatever the gradient holds. Waits for the device where the gradient is sparse.
[[nodiscard]] at::Tensor scaled(const at::Tensor& gradient, const Factor& factor);

}  // namespace pydist
