#include "reducer/gradients/factor.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/item.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/ScalarType.h>

#include <utility>

#include "c10d/device_streams.h"

namespace pydist {

DeviceNumber::DeviceNumber(at::Tensor value)
    : value_(std::move(value)), stream_(current_stream(device_of(value_.device()))) {}

const at::Tensor& DeviceNumber::on_current_stream() const {
  const c10::Stream current = current_stream(device_of(value_.device()));
  if (current != stream_) {
    wait_on_device(current, stream_);
    value_.record_stream(current);
  }
  return value_;
}

GradientFactor::GradientFactor(const at::Tensor& factor)
    : value(factor), in_float32(factor.to(at::kFloat)), is_zero(factor == 0) {}

at::Tensor scaled(const at::Tensor& gradient, const Factor& factor) {
  if (!gradient.defined() || (!factor.on_device && factor.number == 1.0)) {
    return gradient;
  }
  if (!factor.on_device || gradient.is_sparse()) {
    const double number = factor.on_device
                              ? factor.on_device->value.on_current_stream().item<double>()
                              : factor.number;
    return number == 0.0 ? at::zeros_like(gradient) : gradient.mul(number);
  }
  // In float32 at least: torch rounds a tensor without dimensions to the type of the other first.
  const at::ScalarType type = gradient.scalar_type();
  const at::ScalarType wide = c10::promoteTypes(type, at::kFloat);
  const bool is_double = c10::toRealValueType(wide) == at::kDouble;
  const DeviceNumber& number = is_double ? factor.on_device->value : factor.on_device->in_float32;
  const at::Tensor product = gradient.to(wide).mul(number.on_current_stream()).to(type);
  return at::where(factor.on_device->is_zero.on_current_stream(), 0, product);
}

}  // namespace pydist
