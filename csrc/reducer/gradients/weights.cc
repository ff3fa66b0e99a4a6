#include "reducer/gradients/weights.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>

#include "c10d/device_streams.h"

namespace pydist {
namespace {

at::Tensor number_on(c10::Device device, double number) {
  return at::full({}, number, at::TensorOptions(at::kDouble).device(device));
}

}  // namespace

Factor Weights::count(const Weight& weight, bool is_alone, std::optional<Device> device) {
  const auto* const computed = std::get_if<DeviceNumber>(&weight);
  if (computed != nullptr && (device || are_on_device())) {
    return count_on_device(computed->on_current_stream(), is_alone);
  }
  const double number =
      computed != nullptr ? computed->on_current_stream().item<double>() : std::get<double>(weight);
  if (are_on_device()) {
    const c10::Device its = total_on_device_->on_current_stream().device();
    return count_on_device(number_on(its, number), is_alone);
  }
  total_ += number;
  unit_ = unit_ == 0 ? number : unit_;
  return {number == 0 ? 0.0 : number / unit_, std::nullopt};
}

Factor Weights::count_on_device(const at::Tensor& weight, bool is_alone) {
  if (!are_on_device() && unit_ == 0 && is_alone) {
    total_on_device_ = unit_on_device_ = DeviceNumber(weight);
    return {};
  }
  if (!are_on_device()) {
    total_on_device_ = DeviceNumber(number_on(weight.device(), total_));
    unit_on_device_ = DeviceNumber(number_on(weight.device(), unit_));
  }
  const at::Tensor& before = unit_on_device_->on_current_stream();
  const at::Tensor unit = at::where(before == 0, weight, before);
  total_on_device_ = DeviceNumber(total_on_device_->on_current_stream() + weight);
  unit_on_device_ = DeviceNumber(unit);
  return {1.0, GradientFactor(at::where(weight == 0, 0.0, weight / unit))};
}

double Weights::total(double otherwise) const noexcept { return has_weighted ? total_ : otherwise; }

at::Tensor Weights::total_on(Device device, double otherwise) const {
  return are_on_device() ? total_on_device_->on_current_stream().clone()
                         : number_on(torch_device(device), total(otherwise));
}

DeviceNumber Weights::unit_on(Device device) const {
  return are_on_device() ? *unit_on_device_ : DeviceNumber(number_on(torch_device(device), unit()));
}

}  // namespace pydist
