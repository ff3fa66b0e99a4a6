#include "reducer/gradients/weights.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>

#include "c10d/device_streams.h"

namespace pydist {
namespace {

at::Tensor number_on(Device device, double number) {
  return at::full({}, number, at::TensorOptions(at::kDouble).device(torch_device(device)));
}

double on_host(const Weight& weight) {
  const auto* const number = std::get_if<double>(&weight);
  return number != nullptr ? *number : std::get<DeviceNumber>(weight).here().item<double>();
}

}  // namespace

Factor Weights::count(const Weight& weight, bool leaves, std::optional<Device> device) {
  if (device) {
    const auto* const number = std::get_if<double>(&weight);
    return count_there(
        number != nullptr ? number_on(*device, *number) : std::get<DeviceNumber>(weight).here(),
        leaves);
  }
  const double number = on_host(weight);
  total_ += number;
  unit_ = unit_ == 0 ? number : unit_;
  return {number == 0 ? 0.0 : number / unit_, std::nullopt};
}

Factor Weights::count_there(const at::Tensor& weight, bool leaves) {
  const bool is_first = !total_there_;
  if (is_first) {
    total_there_ = unit_there_ = DeviceNumber(weight);
    if (leaves) {
      return {};
    }
  } else {
    const at::Tensor& unit = unit_there_->here();
    total_there_ = DeviceNumber(total_there_->here() + weight);
    unit_there_ = DeviceNumber(at::where(unit == 0, weight, unit));
  }
  return {1.0, DeviceNumber(at::where(weight == 0, 0.0, weight / unit_there_->here()))};
}

double Weights::total(double otherwise) const noexcept { return has_weighted ? total_ : otherwise; }

at::Tensor Weights::total_on(Device device, double otherwise) const {
  // A copy: the sum over the ranks is written into it.
  return total_there_ ? total_there_->here().clone() : number_on(device, otherwise);
}

Factor Weights::share_of(double total) const noexcept {
  const double unit = has_weighted ? unit_ : 1.0;
  return {total > 0 ? unit / total : 0.0, std::nullopt};
}

Factor Weights::share_of(const at::Tensor& total) const {
  const at::Tensor unit = unit_there_ ? unit_there_->here() : at::ones_like(total);
  return {1.0, DeviceNumber(at::where(total == 0, 0.0, unit / total))};
}

}  // namespace pydist
