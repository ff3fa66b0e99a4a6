// What follows the closing of a round, see Note [Rounds]: warnings, late gradients, new and unused
// parameters, the next plan.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "reducer/reducer.h"

namespace pydist {
namespace {

// Instead of a plan, where rank 0 has none.
constexpr std::int64_t kNoPlan = -1;

}  // namespace

// If a rank leaves out a step, because its loss raised before backward came to the model, its next
// step is averaged with the present one of the other ranks. Only the numbers of forwards show that.
void Reducer::warn_of_skipped_steps() {
  for (int rank = 1; rank < communicator_->size() && !has_warned_; ++rank) {
    const Opening first = openings_.of(0);
    const Opening other = openings_.of(rank);
    if (first.forwards != other.forwards && first.is_present && other.is_present) {
      has_warned_ = true;
      log_line(
          LogLevel::kWarning,
          join("rank 0 ran ", first.forwards, " forward(s) for training before this step and rank ",
               rank, " ran ", other.forwards,
               ": if one of them left out a step, the ranks average different steps from now on; "
               "wrap forwards that are for nothing else in torch.no_grad()"));
    }
  }
}

// In torch's DDP a forward outside of no_sync() lets the next backward average, whichever it is.
void Reducer::warn_of_earlier_forward() {
  if (!a_forward_averages_.value_or(false) || has_warned_of_forward_) {
    return;
  }
  has_warned_of_forward_ = true;
  log_line(
      LogLevel::kWarning,
      "a backward of a forward under no_sync() is not averaged, and an earlier forward outside "
      "of no_sync() has had no backward yet. torch's DistributedDataParallel would average "
      "this one instead of that one's; here each backward goes by its own forward. Run "
      "forwards that have no backward in torch.no_grad()");
}

// In join(), torch copies buffers before a forward, from the last rank that has a batch then. Here
// they were copied at the end of the step before, when that rank may have been another one.
void Reducer::warn_of_buffers_root(int root) {
  if (joining_ == Joining::kNot || !buffers_root_ || root == *buffers_root_ ||
      root != communicator_->rank() || has_warned_of_root_) {
    return;
  }
  has_warned_of_root_ = true;
  log_line(LogLevel::kWarning, join("this step has begun with the buffers of rank ", *buffers_root_,
                                    "; torch's join() would have copied those of rank ", root,
                                    ", the last one that has a batch, before the forward"));
}

// In join(), torch adds up what ranks have accumulated onto an average, and divides by all of them;
// a rank without a batch has nothing to add, so the average itself is made smaller.
void Reducer::warn_of_averages_kept() {
  if (joining_ != Joining::kAsZeros || openings_.present() == communicator_->size() ||
      has_warned_of_averages_ ||
      std::none_of(arena_.slots().begin(), arena_.slots().end(),
                   [](const GradientSlot& slot) { return slot.aside.defined(); })) {
    return;
  }
  has_warned_of_averages_ = true;
  log_line(
      LogLevel::kWarning,
      "in join() some ranks have no more batches, and gradients accumulate onto averaged ones: "
      "torch's DistributedDataParallel would make the averaged ones smaller by the share of "
      "those ranks; here they stay as they are. Zero gradients after each averaged backward");
}

// Does what the closing of any rank asks for.
void Reducer::do_the_rest() {
  warn_of_skipped_steps();
  send_late();
  std::optional<SparseSums> sparse = send_sparse();
  // As in torch's DDP.
  const int root = joining_ == Joining::kNot ? root_outside_join_ : openings_.highest_present();
  warn_of_buffers_root(root);
  warn_of_averages_kept();
  if (closings_->any(&Closing::wants_buffers)) {
    exchange_buffers(root);
    buffers_root_ = root;
  }
  operations_.wait();
  if (sparse) {
    sparse->finish();
  }
}

// Parameters that joined the model get memory for their gradients, and rank 0's values, as all did
// when the module was wrapped; and so do the buffers that came with them.
void Reducer::admit_new() {
  arena_.allocate();
  for (; admitted_ < arena_.slots().size(); ++admitted_) {
    const GradientSlot& slot = arena_.slots()[admitted_];
    const at::Tensor values = slot.parameter.detach();
    const at::Tensor memory = values.contiguous();
    operations_
        .broadcast(memory.view({-1}).view(at::kByte), /*root=*/0, join("values of ", slot.name))
        ->wait();
    if (communicator_->rank() != 0 && !memory.is_same(values)) {
      values.copy_(memory);
    }
  }
  if (buffers_) {
    buffers_->memory = buffers_->renew();
    exchange_buffers(/*root=*/0);
  }
}

// Gradients that came too late for their bucket, and those of parameters that have none yet.
void Reducer::send_late() {
  for (GradientSlot& slot : arena_.slots()) {
    const bool is_new = !slot.is_sparse && !has_place(slot) && closings_->used(slot.index) != 0;
    if (is_new) {
      slot.late = slot.sends == GradientSlot::Sends::kOwn
                      ? slot.parameter.grad().detach().contiguous()
                      : at::zeros_like(slot.parameter).detach();
    } else if (!closings_->is_late(slot.index)) {
      continue;
    } else {
      slot.late = slot.late.defined() ? slot.late.contiguous()
                                      : at::zeros(slot.view.sizes(), slot.view.options());
    }
    operations_.combine(*round_.combination, slot.late, /*shard=*/{},
                        join("late gradient of ", slot.name));
  }
}

// Lets rank 0 plan the buckets of the next round, and takes over its plan. Returns the error if
// planning failed, on every rank.
std::exception_ptr Reducer::exchange_plan() {
  const std::size_t slots = arena_.slots().size();
  at::Tensor words =
      at::empty({static_cast<std::int64_t>(encoded_words(slots))}, at::TensorOptions(at::kLong));
  auto* const data = words.mutable_data_ptr<std::int64_t>();
  std::exception_ptr error;
  if (communicator_->rank() == 0) {
    data[0] = kNoPlan;
    try {
      const BucketPlan plan = arena_.feasible(planner_(order_.expected(), arena_.blocks(), speed_));
      if (const std::string why = why_invalid(plan, arena_.blocks()); !why.empty()) {
        throw InvalidUsage(join("plan_buckets() returned a plan that does not fit: ", why));
      }
      const std::vector<std::int64_t> encoded = encode(plan, slots);
      std::copy(encoded.begin(), encoded.end(), data);
    } catch (...) {
      error = std::current_exception();
    }
  }
  operations_.broadcast(words, /*root=*/0, "plan of the buckets")->wait();
  order_.note_plan();
  if (error != nullptr) {
    return error;
  }
  if (data[0] == kNoPlan) {
    return make_error(ErrorKind::kError,
                      "planning the buckets raised on rank 0: the exception is there");
  }
  BucketPlan plan = decode({data, encoded_words(slots)});
  if (plan != arena_.plan()) {
    next_plan_ = std::move(plan);
  }
  return nullptr;
}

// Brings the averages of a complete round to the parameters. A parameter that was unused on every
// rank keeps the gradient that it had.
void Reducer::settle(bool learns) {
  if (round_.is_bare) {
    return;
  }
  for (GradientSlot& slot : arena_.slots()) {
    if (!has_place(slot)) {
      continue;
    }
    const bool is_used = closings_->used(slot.index) != 0;
    if (!is_sharded(slot)) {
      arena_.lent().unload(slot, is_used);
    } else if (is_used && is_absent(slot)) {
      show_shard(slot);  // so that what was set aside is added to it
    }
  }
  std::vector<bool> is_used_by_all;
  bool all_use_alike = true;
  for (GradientSlot& slot : arena_.slots()) {
    const int users = closings_->used(slot.index);
    is_used_by_all.push_back(users == openings_.present());
    all_use_alike = all_use_alike && (is_used_by_all.back() || users == 0);
    if (slot.late.defined()) {
      if (is_sharded(slot)) {
        slot.segment.add_(segment_of(slot, slot.late));
      } else if (has_place(slot)) {
        slot.view.add_(slot.late);
      } else if (slot.is_sparse && slot.parameter.grad().defined()) {
        slot.parameter.mutable_grad().copy_(slot.late);  // whoever holds it sees the average
      } else {
        slot.parameter.mutable_grad() = slot.late;
      }
    }
    if (slot.aside.defined() && !slot.parameter.grad().defined()) {
      arena_.lent().make_room(slot);
    }
    put_back(slot);
    if (is_sharded(slot) && closings_->used(slot.index) != 0) {
      show_shard(slot);
    }
    slot.is_pending = false;
    note_seen(slot, /*by_value=*/adds_up());
    if (learns && slot.fired_in == round_.number) {
      slot.expected_fires = std::max(slot.fires, 1);
    }
  }
  arena_.release();
  if (learns) {
    all_use_alike_ = all_use_alike;
    order_.close_round(is_used_by_all);
    ++rounds_learned_;
  }
}

}  // namespace pydist
