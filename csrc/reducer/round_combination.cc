// How the gradients of a round are combined: by a mean, a sum, or by each rank's share. Decided
// from the openings of all ranks; see Note [Rounds].

#include <algorithm>

#include "c10d/device_streams.h"
#include "reducer/reducer.h"

namespace pydist {

// A rank that counts by share, or has no gradients of its own, needs the openings of all ranks
// before it can launch anything. It does not wait for them within backward, see
// end_of_several_reducers.h: buckets that can't leave yet leave when all ranks have opened the
// round.
bool Reducer::may_launch() {
  if (round_.opening == nullptr) {
    open_round();
  }
  if (!round_.combination && round_.opening->is_completed()) {
    decide_combination();
  }
  return round_.combination.has_value();
}

// Waits for all openings.
void Reducer::decide_combination() {
  if (round_.combination) {
    return;
  }
  round_.opening->wait();
  bool is_by_share = false;
  bool is_as_one = false;
  bool is_on_device = false;
  for (int rank = 0; rank < communicator_->size(); ++rank) {
    const Opening opening = openings_.of(rank);
    is_by_share = is_by_share || opening.mode == Opening::Mode::kByShare;
    is_as_one = is_as_one || opening.mode == Opening::Mode::kAsOne;
    is_on_device = is_on_device || opening.has_share_on_device;
    round_.is_bare = round_.is_bare || (opening.is_present && opening.is_bare);
  }
  // Ranks that count as one have launched without waiting. If they meet ranks that count by share,
  // there is no mean, but all ranks have done the same operations, and why_worthless() says so on
  // all of them.
  if (is_as_one || !is_by_share) {
    round_.combination = {options_.sums ? ReduceOp::kSum : ReduceOp::kMean};
    return;
  }
  if (is_on_device) {
    round_.combination = combination_on_device();
    return;
  }
  const double total = options_.sums ? 1.0 : openings_.total_share();
  round_.combination = {ReduceOp::kPremulSum, total > 0 ? weights_.unit() / total : 0.0};
}

std::optional<Device> Reducer::device_of_weights() const {
  const std::optional<Device> device = arena_.device();
  const auto is_elsewhere = [&device](const GradientSlot& slot) {
    return slot.parameter.device() != torch_device(*device);
  };
  const std::vector<GradientSlot>& slots = arena_.slots();
  // A hook of the program would have to be given gradients that are multiplied already, for which
  // the stream that computes would wait.
  const bool can_stay = device && communicator_->capabilities().takes_device_factors &&
                        !policy_->is_of_program() &&
                        std::none_of(slots.begin(), slots.end(), is_elsewhere);
  return can_stay ? device : std::nullopt;
}

// See Note [Weights on the device].
Combination Reducer::combination_on_device() {
  const Device device = *arena_.device();
  DeviceShare share{weights_.unit_on(device), {}};
  if (!options_.sums) {
    const double own = openings_.of(communicator_->rank()).share;
    share.total = weights_.total_on(device, own);
    // Nobody waits for it here: the buckets come behind it, in the order of the group.
    operations_.submit({.kind = OpKind::kAllReduce}, share.total, share.total,
                       "sum of the weights");
  }
  return {ReduceOp::kPremulSum, 1.0, std::move(share)};
}

}  // namespace pydist
