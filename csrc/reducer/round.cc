// One synchronisation, step by step; see Note [Rounds]. What comes after its closing is in
// round_after_closing.cc, what it starts in operations/.

#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "base/error.h"
#include "c10d/device_streams.h"
#include "reducer/reducer.h"

namespace pydist {

void Reducer::restart() {
  const std::uint64_t next = round_.number + 1;
  round_ = {};
  round_.number = next;
  weights_ = {};
  has_bypassed_ = false;
  for (GradientSlot& slot : arena_.slots()) {
    slot.sends = GradientSlot::Sends::kNothing;
    slot.travels_in.reset();
    slot.before.reset();
    slot.late.reset();
  }
  for (GradientBucket& bucket : arena_.buckets()) {
    bucket.travelling.reset();
  }
  count_missing();
}

// Nothing that was accumulated or set aside counts any more.
void Reducer::forget_pending() {
  for (GradientSlot& slot : arena_.slots()) {
    slot.is_pending = false;
    slot.aside.reset();
  }
}

void Reducer::count_missing() {
  for (GradientBucket& bucket : arena_.buckets()) {
    bucket.missing = 0;
    bucket.streams.clear();
  }
  if (!arena_.buckets().empty()) {
    for (const GradientSlot& slot : arena_.slots()) {
      ++arena_.buckets()[slot.bucket].missing;
    }
  }
}

void Reducer::open_round() {
  using Mode = Opening::Mode;
  Opening own;
  own.is_present = is_present_;
  own.mode = weights_.has_weighted && weights_.has_plain ? Mode::kMixed
             : weights_.has_weighted                     ? Mode::kByShare
             : !weights_.has_plain || !is_present_       ? Mode::kNothing
             : joining_ == Joining::kNotAtAll            ? Mode::kByShare
                                                         : Mode::kAsOne;
  own.share = own.mode == Mode::kNothing ? 0.0 : weights_.total(/*otherwise=*/1.0);
  own.has_share_on_device = weights_.are_on_device();
  own.digest = model_digest();
  own.slots = arena_.slots().size();
  own.is_bare = round_.is_bare;
  own.forwards = std::exchange(forwards_, 0);
  own.stepping = stepping_;
  own.changed_buffers = std::exchange(changed_buffers_, 0);
  own.first_changed_buffer = std::exchange(first_changed_buffer_, 0);
  openings_.write(own);
  round_.opening = operations_.submit({.kind = OpKind::kAllGather}, openings_.own(),
                                      openings_.all(), "opening of a round");
  if (own.mode == Mode::kAsOne) {
    round_.combination = {options_.sums ? ReduceOp::kSum : ReduceOp::kMean};
  }
}

void Reducer::launch(Closing::Status status) {
  const c10::AutoGradMode no_grad(false);
  const Instant began = now_ns();
  const std::size_t number = round_.launched;
  GradientBucket& bucket = arena_.buckets()[number];
  // A rank that gives up must not wait for memory, so it may have to launch without the bucket's
  // own.
  bool is_lost = false;
  std::optional<c10::StreamGuard> beside;
  if (status == Closing::Status::kFine) {
    for (const c10::Stream& stream : bucket.streams) {
      wait_on_device(current_stream(device_of(stream.device())), stream);
    }
    for (const std::size_t index : bucket.slots) {
      fill(arena_.slots()[index]);
    }
    bucket.travelling = arena_.lent().load(arena_.slots(), bucket.slots, bucket.memory);
  } else {
    beside_program([&] {
      is_lost = !has_memory(number);
      if (!bucket.memory.is_cpu() && is_capturing() && communicator_->capabilities().needs_host) {
        // Nobody looks at the values, but the peers wait for them. They go on a stream of their
        // own, because the one that is captured would refuse them.
        beside.emplace(high_priority_stream(device_of(bucket.memory.device())));
      }
      bucket.travelling = arena_.lent().load_nothing(arena_.slots(), bucket.slots, bucket.memory);
    });
  }
  note_capture();
  round_.times->buckets[number].launched = now_ns();
  const at::Tensor memory = is_lost ? at::empty_like(bucket.memory) : bucket.travelling;
  const at::Tensor shard = is_lost ? at::empty_like(bucket.shard) : bucket.shard;
  const DepartingBucket departing{number, bucket.label, memory, shard};
  const auto watcher = status == Closing::Status::kFine && !round_.is_captured
                           ? watchers_.find(bucket.owner)
                           : watchers_.end();
  WorkPtr work;
  try {
    if (status == Closing::Status::kFine) {
      policy_->prepare(departing, *round_.combination);
    }
    if (watcher != watchers_.end()) {
      watcher->second(bucket, nullptr);
    }
    work = policy_->reduce(
        departing, *round_.combination,
        [times = round_.times, number](const auto&) { times->buckets[number].done = now_ns(); });
    if (bucket.berth != nullptr && !is_lost) {
      bucket.berth->set_work(work);
    }
  } catch (...) {
    // What the program raises while a round is given up changes nothing: the closing tells it.
    if (status == Closing::Status::kFine || !policy_->has_raised()) {
      throw;
    }
  }
  // Counted only now: a bucket that was refused is sent when the round is given up.
  ++round_.launched;
  if (watcher != watchers_.end()) {
    watcher->second(bucket, work);
  }
  if (round_.times->computed == 0) {
    round_.launching_s += static_cast<double>(now_ns() - began) * 1e-9;
  }
}

// Whether its bucket is on its way already, as happens to a weight that is shared by several
// reentrant checkpoints, until it is known how often it fires.
bool Reducer::is_late(const GradientSlot& slot) const {
  return has_place(slot) && slot.bucket < round_.launched;
}

void Reducer::launch_what_is_ready() {
  const std::vector<GradientBucket>& buckets = arena_.buckets();
  const auto is_ready = [this](const GradientBucket& bucket) {
    return bucket.missing == 0 && !arena_.is_landing_in(bucket.slots);
  };
  while (round_.launched < buckets.size() && is_ready(buckets[round_.launched]) && may_launch() &&
         has_memory(round_.launched)) {
    launch(Closing::Status::kFine);
  }
}

// Stops at a bucket whose memory still belongs to another one that is on its way.
void Reducer::launch_what_has_memory() {
  while (!round_.is_bare && round_.launched < arena_.buckets().size() &&
         has_memory(round_.launched)) {
    launch(Closing::Status::kFine);
  }
}

bool Reducer::has_memory(std::size_t bucket) {
  return arena_.bind(arena_.buckets()[bucket], /*is_next=*/true);
}

// Whether averaging what was averaged already leaves it as it is; see Note [Set aside].
bool Reducer::keeps_averages() const {
  return round_.combination->op == ReduceOp::kMean && joining_ == Joining::kNot;
}

// Decides what this rank sends for a slot, and puts it there.
void Reducer::fill(GradientSlot& slot) {
  move_in(slot);
  const bool has_gradient = slot.parameter.grad().defined();
  const auto lies_elsewhere = [&] {
    return has_gradient && !holds_gradient(slot) && !shows_shard(slot);
  };
  if (lies_elsewhere() && is_seen(slot)) {
    arena_.lent().take_in(slot);  // it had no place to land, or was moved with the module
  }
  check_aside(slot);
  const bool counts = is_present_ && has_gradient && (slot.is_pending || is_by_hand(slot));
  if (lies_elsewhere()) {
    arena_.lent().take_in(slot);
  }
  using Sends = GradientSlot::Sends;
  if (counts) {
    slot.sends = Sends::kOwn;
  } else if (!is_present_) {
    slot.parameter.mutable_grad().reset();  // of an earlier step, which the others have forgotten
    slot.sends = Sends::kZeros;
  } else if (has_gradient && keeps_averages() && !is_sharded(slot)) {
    slot.sends = Sends::kAgain;
  } else {
    if (has_gradient) {
      set_aside(slot);
    }
    slot.sends = Sends::kZeros;
  }
}

void Reducer::launch_rest(Closing::Status status) {
  while (!round_.is_bare && round_.launched < arena_.buckets().size()) {
    if (status == Closing::Status::kFine && !has_memory(round_.launched)) {
      arena_.buckets()[round_.launched].berth->wait();
      PYDIST_CHECK(has_memory(round_.launched));
    }
    launch(status);
  }
}

// Decides what this rank sends of the gradients that have no place in a bucket.
void Reducer::fill_unplaced() {
  for (GradientSlot& slot : arena_.slots()) {
    if (!has_place(slot)) {
      if (!is_present_) {
        slot.parameter.mutable_grad().reset();  // as in fill()
      }
      check_aside(slot);
      const bool counts =
          is_present_ && holds_gradient(slot) && (slot.is_pending || is_by_hand(slot));
      slot.sends = counts ? GradientSlot::Sends::kOwn : GradientSlot::Sends::kNothing;
    }
  }
}

void Reducer::close_round(Closing::Status status) {
  Closing closing{status};
  note_capture();
  closing.is_captured = round_.is_captured;
  if (status == Closing::Status::kFine) {
    require_same_model();
    closing.wants_buffers =
        buffers_ && is_present_ && !closing.is_captured && buffers_->has_changed();
    const bool has_unplaced =
        std::any_of(arena_.slots().begin(), arena_.slots().end(),
                    [](const GradientSlot& slot) { return !slot.is_sparse && !has_place(slot); });
    closing.wants_plan = communicator_->rank() == 0 && !closing.is_captured && !is_plan_fixed_ &&
                         (has_unplaced || (policy_->is_of_program()
                                               ? rounds_learned_ < rounds_before_hook_keeps_plan_
                                               : order_.wants_plan(arena_.plan())));
  } else if (policy_->has_raised()) {
    closing.status = Closing::Status::kHookThrew;
    out_of_step_ = kHooksOutOfStep;
  }
  if (!closings_ || closings_->slots() != arena_.slots().size()) {
    closings_.emplace(communicator_->rank(), communicator_->size(), arena_.slots().size());
  }
  closings_->write(closing);
  for (const GradientSlot& slot : arena_.slots()) {
    if (slot.sends == GradientSlot::Sends::kOwn) {
      closings_->set_used(slot.index);
    }
    if (slot.late.defined()) {
      closings_->set_late(slot.index);
    }
  }
  round_.is_closed = true;
  operations_.submit({.kind = OpKind::kAllReduce}, closings_->memory(), closings_->memory(),
                     "closing of a round");
}

// Checked before the closing, because closings of different models have different lengths.
void Reducer::require_same_model() {
  round_.opening->wait();
  for (int rank = 0; rank < communicator_->size(); ++rank) {
    const Opening theirs = openings_.of(rank);
    if (theirs.purpose == Opening::Purpose::kRound && openings_.of(0).purpose == theirs.purpose &&
        theirs.digest != openings_.of(0).digest) {
      round_.is_closed = true;
      throw Mismatch(
          join("the parameters of ranks 0 and ", rank, " differ (", openings_.of(0).slots, " and ",
               theirs.slots, " that train) since one was unfrozen or added: this rank's last is ",
               arena_.slots().back().name, "; do the same on every rank, before the same forward"),
          Blame{.ranks = {0, rank}, .cause = "the models differ"});
    }
  }
}

// A backward ends in three steps, see end_of_several_reducers.h. The first one launches everything
// that can leave without waiting.
void Reducer::open_or_give_up() {
  const c10::AutoGradMode no_grad(false);
  try {
    if (may_launch()) {
      launch_what_has_memory();
    }
  } catch (...) {
    give_up();
    throw;
  }
}

// The second step. It may wait for the other ranks' openings, because each rank opens its round
// without waiting for others.
void Reducer::close_or_give_up() {
  const c10::AutoGradMode no_grad(false);
  try {
    decide_combination();
    launch_rest(Closing::Status::kFine);
    fill_unplaced();
    hand_over_sparse(Closing::Status::kFine);
    close_round(Closing::Status::kFine);
  } catch (...) {
    give_up();
    throw;
  }
}

void Reducer::conclude_round(bool learns) {
  const c10::AutoGradMode no_grad(false);
  std::exception_ptr common;  // an error that all ranks have, so none has to tell the others
  bool is_agreed = false;
  try {
    wait();
    if (const auto [kind, why, blame] = why_worthless(); !why.empty()) {
      // All ranks know the reason and are in step, with one exception: if only some ranks captured
      // the backward, the devices of the others wait for buckets that are merely recorded there.
      // Then the group has to end. The rank that raised is no longer here to hear why, and finds
      // the group ended.
      if (is_captured_by_some()) {
        std::rethrow_exception(make_error(kind, why, blame));
      }
      is_agreed = true;
      if (has_hook_thrown()) {
        out_of_step_ = kHooksOutOfStep;
      }
      order_.drop_round();
      forget_pending();
      arena_.release();
      forget();
      restart();
      std::rethrow_exception(make_error(kind, why, blame));
    }
    const bool is_captured = closings_->any(&Closing::is_captured);
    if (is_captured) {
      is_plan_fixed_ = true;
      if (const std::string why = why_not_captured(); !why.empty()) {
        common = make_error(ErrorKind::kInvalidUsage, why);
        if (!closings_->all(&Closing::is_captured)) {
          // The others' devices wait for buckets that are only recorded here: there is no way on.
          let_all_hear();
          std::rethrow_exception(common);
        }
      }
    }
    do_the_rest();
    settle(learns && !is_captured);
    if (admitted_ < arena_.slots().size()) {
      admit_new();
    }
    if (!is_captured && closings_->any(&Closing::wants_plan)) {
      common = exchange_plan();
    }
    if (next_plan_ && arena_.has_uncut()) {
      apply_plan();  // an optimizer steps before the next round begins
    }
    if (options_.checks_gradients && !is_captured) {  // what is only recorded has no values yet
      if (std::exception_ptr difference = compare_gradients(); difference != nullptr) {
        common = std::move(difference);
      }
    }
  } catch (...) {
    if (!is_agreed) {
      break_off();
    }
    throw;
  }
  finish_times();
  forget();
  restart();
  rethrow_if_any(common);
  ++rounds_concluded_;
}

// All steps at once, outside of backward.
void Reducer::run_round() {
  round_.times->computed = now_ns();
  open_or_give_up();
  close_or_give_up();
  conclude_round(/*learns=*/false);
}

void Reducer::finish_times() {
  if (round_.is_bare) {
    return;
  }
  round_.times->ended = now_ns();
  stats_.copied_bytes += arena_.lent().take_copied_bytes();
  add_round(stats_, arena_, *round_.times, round_.launching_s);
  if (timeline_ != nullptr) {
    timeline_->write(arena_, *round_.times, place_, stats_.rounds);
  }
}

// -- what is under way

void Reducer::wait() {
  operations_.wait();
  finish_buckets();
}

void Reducer::finish_buckets() {
  if (policy_->is_idle()) {
    return;
  }
  if (has_hook_thrown()) {
    // One rank's hook has not taken part, so what the other ranks' hooks wait for may never come.
    policy_->forget();
    return;
  }
  policy_->finish();
}

bool Reducer::is_idle() const { return operations_.is_idle() && policy_->is_idle(); }

// Waits for what an earlier round has left under way.
void Reducer::drain() {
  lose_held("something else");
  if (is_idle()) {
    return;
  }
  try {
    operations_.drain();
    finish_buckets();
  } catch (...) {
    if (operations_.is_over() && policy_->is_over()) {
      forget();
    }
    throw;
  }
  forget();
}

void Reducer::forget() {
  operations_.forget();
  policy_->forget();
}

}  // namespace pydist
