// By what gradients are multiplied, where backwards have weights: a number that the host knows, or
// one that a device computes, for which the host does not wait.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>

namespace pydist {

// A number that a device computes.
class DeviceNumber {
 public:
  // Without dimensions: what the current stream of its device has been told to compute.
  explicit DeviceNumber(at::Tensor value);

  // The current stream waits for the one that computes it.
  [[nodiscard]] const at::Tensor& on_current_stream() const;

 private:
  at::Tensor value_;
  c10::Stream stream_;
};

// The same for all gradients of a backward, so what they need of it is computed once.
struct GradientFactor {
  // Of float64.
  explicit GradientFactor(const at::Tensor& factor);

  DeviceNumber value;
  DeviceNumber in_float32;
  DeviceNumber is_zero;
};

// What gradients are multiplied by as they arrive.
struct Factor {
  double number = 1.0;
  std::optional<GradientFactor> on_device;  // in place of the number
};

// `gradient` times the factor, rounded once to the gradient's type. A factor of zero makes zeros,
// whatever the gradient holds. The host waits for the device where the gradient is sparse.
[[nodiscard]] at::Tensor scaled(const at::Tensor& gradient, const Factor& factor);

}  // namespace pydist
