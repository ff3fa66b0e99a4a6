// For how much backwards count, see `DataParallel.weighted`.
//
// Note [Weights on the device]
// A weight such as mask.sum() is a number that a GPU computes, long after the host has begun
// backward. Where the communicator takes factors from the device, the host does not wait for it:
// each rank's weights are added up on its GPU, one all-reduce ahead of the buckets sums these over
// the ranks, and each bucket's collective is given the addresses of its numerator and denominator.
// The stream that computes waits for none of it before the end of backward: other ranks may be
// waiting for what it has yet to launch (a SyncBatchNorm), while they have yet to launch their part
// of the sum.
//
// The openings tell whether any rank has a weight on its GPU. Only then all ranks sum theirs there,
// also those whose hosts know them.

#pragma once

#include <optional>
#include <variant>

#include "base/buffer.h"
#include "reducer/gradients/factor.h"

namespace pydist {

// Not negative, and finite. One that a device computes is NaN where it would be anything else.
using Weight = std::variant<double, DeviceNumber>;

// By what a rank's gradients are multiplied on their way: `unit` divided by `total`.
struct DeviceShare {
  DeviceNumber unit;
  at::Tensor total;  // undefined: 1
};

// Of the backwards since the last round. They are forgotten together with the gradients.
class Weights {
 public:
  bool has_weighted = false;
  bool has_plain = false;
  bool has_gradients = false;

  // Counts a backward. Returns by what its gradients are multiplied as they arrive, so that all of
  // this rank's are in one unit: the first weight that is not zero.
  // `is_alone`: all gradients of this backward leave at its end, in buckets. Then nothing has to be
  // done to them as they arrive: the collective makes zeros of them where the weight is zero.
  // `device`: where weights stay that a device has computed; without one the host reads them.
  [[nodiscard]] Factor count(const Weight& weight, bool is_alone, std::optional<Device> device);

  [[nodiscard]] bool are_on_device() const noexcept { return total_on_device_.has_value(); }

  // What this rank adds to the sum over the ranks; `otherwise` without weights.
  [[nodiscard]] double total(double otherwise) const noexcept;
  // The same as a new tensor on a device.
  [[nodiscard]] at::Tensor total_on(Device device, double otherwise) const;

  // The unit: 1 without weights.
  [[nodiscard]] double unit() const noexcept { return has_weighted ? unit_ : 1.0; }
  [[nodiscard]] DeviceNumber unit_on(Device device) const;

 private:
  [[nodiscard]] Factor count_on_device(const at::Tensor& weight, bool is_alone);

  // Of what the host knows.
  double unit_ = 0.0;
  double total_ = 0.0;
  // In place of them, once a weight has stayed on a device.
  std::optional<DeviceNumber> unit_on_device_;
  std::optional<DeviceNumber> total_on_device_;
};

}  // namespace pydist
