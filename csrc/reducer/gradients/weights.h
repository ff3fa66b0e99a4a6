// For how much backwards count, see `DataParallel.weighted`.
//
// Note [Weights on the device]
// A weight such as mask.sum() is a number that a GPU computes, long after the host has begun
// backward. Where the communicator takes factors from the device nobody waits for it. Weights are
// added up there, and summed over the ranks ahead of the first bucket; the collectives read there
// by what they multiply. Then all weights are on the device, those too that the host knows: what a
// rank launches must not depend on what another was given.

#pragma once

#include <optional>
#include <variant>

#include "base/buffer.h"
#include "reducer/gradients/factor.h"

namespace pydist {

// Not negative, finite; what the device computes is not a number where it would be anything else.
using Weight = std::variant<double, DeviceNumber>;

// Of the backwards since the last round. They are forgotten together with the gradients.
class Weights {
 public:
  bool has_weighted = false;
  bool has_plain = false;
  bool has_gradients = false;

  // Counts a backward. Returns by what its gradients are multiplied as they land, so that all of
  // this rank's are in one unit: the first weight that is not zero. `leaves`: all of
  // them leave at its end in buckets, which may be made zeros then, where it counts for nothing.
  // With a `device`, weights are on it; so they are for the whole round, or not at all.
  [[nodiscard]] Factor count(const Weight& weight, bool leaves, std::optional<Device> device);

  [[nodiscard]] bool are_on_device() const noexcept { return total_there_.has_value(); }

  // Without weights, this rank counts for `otherwise`.
  [[nodiscard]] double total(double otherwise) const noexcept;
  [[nodiscard]] at::Tensor total_on(Device device, double otherwise) const;

  // By what this rank's gradients are multiplied, given the sum of all ranks' totals.
  [[nodiscard]] Factor share_of(double total) const noexcept;
  [[nodiscard]] Factor share_of(const at::Tensor& total) const;

 private:
  [[nodiscard]] Factor count_there(const at::Tensor& weight, bool leaves);

  double unit_ = 0.0;
  double total_ = 0.0;
  std::optional<DeviceNumber> unit_there_;  // on the device
  std::optional<DeviceNumber> total_there_;
};

}  // namespace pydist
