// Sparse gradients of a round, which have no place in a bucket's memory: what any rank has used is
// gathered from all after the closing; or a hook of the program gets each before it.

#include <ATen/ops/_sparse_coo_tensor_with_dims.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "c10d/sparse/sparse_all_reduce.h"
#include "reducer/reducer.h"

namespace pydist {

namespace {

at::Tensor no_values(const GradientSlot& slot) {
  return at::_sparse_coo_tensor_with_dims(/*sparse_dim=*/1, slot.parameter.dim() - 1,
                                          slot.parameter.sizes(),
                                          slot.parameter.options().layout(at::kSparse));
}

}  // namespace

// What this rank sends, as fill() decides it for gradients that have a place.
at::Tensor Reducer::sparse_to_send(const GradientSlot& slot) const {
  if (slot.sends == GradientSlot::Sends::kOwn) {
    return slot.parameter.grad();
  }
  const bool sends_again = slot.parameter.grad().defined() && is_present_ && keeps_averages();
  return sends_again ? slot.parameter.grad().clone() : no_values(slot);
}

// Hands the sparse gradients to the program, if it averages: before the closing, which tells
// whether it has raised. So it gets those, too, that no rank has used.
void Reducer::hand_over_sparse(Closing::Status status) {
  if (!policy_->is_of_program() || round_.is_bare) {
    return;
  }
  std::size_t number = 0;
  for (const GradientSlot& slot : arena_.slots()) {
    if (!slot.is_sparse || number++ < round_.handed_over.size()) {
      continue;  // dense, or handed over before the round was given up
    }
    try {
      round_.handed_over.push_back(policy_->reduce_sparse(
          slot, status == Closing::Status::kFine ? sparse_to_send(slot) : no_values(slot),
          *round_.combination));
    } catch (...) {
      // As in launch().
      if (status == Closing::Status::kFine || !policy_->has_raised()) {
        throw;
      }
    }
  }
}

// The sums of what any rank has used; none where there is nothing to sum.
std::optional<SparseSums> Reducer::send_sparse() {
  std::vector<at::Tensor> gradients;
  const bool hook_averages = !round_.handed_over.empty();
  auto averaged = round_.handed_over.begin();
  for (GradientSlot& slot : arena_.slots()) {
    if (!slot.is_sparse) {
      continue;
    }
    const at::Tensor by_hook = hook_averages ? *averaged++ : at::Tensor();
    if (closings_->used(slot.index) == 0) {
      continue;
    }
    slot.late = hook_averages ? by_hook : sparse_to_send(slot);
    if (slot.sends != GradientSlot::Sends::kOwn && slot.parameter.grad().defined() && is_present_ &&
        !keeps_averages()) {
      set_aside(slot);
    }
    gradients.push_back(slot.late);
  }
  if (hook_averages || gradients.empty()) {
    return std::nullopt;
  }
  const Combination& combination = *round_.combination;
  double factor = combination.factor;
  if (combination.share) {
    // The host waits for numbers of rows as well.
    operations_.wait();
    const at::Tensor& total = combination.share->total;
    const double unit = combination.share->unit.on_current_stream().item<double>();
    const double divisor = total.defined() ? total.item<double>() : 1.0;
    factor = divisor == 0 ? 0.0 : unit / divisor;
  }
  SparseSums sums(*communicator_, gradients, combination.op, factor, /*deadline=*/std::nullopt);
  for (const WorkPtr& work : sums.gathered()) {
    operations_.add(work);
  }
  return sums;
}

}  // namespace pydist
