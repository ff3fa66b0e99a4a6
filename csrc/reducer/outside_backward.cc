// What a program asks of a reducer outside of backward: a forward, a vote, a round of its own, an
// end.

#include <c10/core/GradMode.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "base/digest.h"
#include "base/error.h"
#include "reducer/reducer.h"

namespace pydist {

void Reducer::prepare_forward(bool is_for_training) {
  if (is_for_training) {
    await_thrown();
  }
  if (is_held_ && !c10::GradMode::is_enabled()) {
    return;  // no backward follows this forward, so it leaves the gradients alone
  }
  forwards_ += is_for_training ? 1 : 0;
  const bool is_outside = current_.expired();
  if (is_outside) {
    lose_held("a forward with gradients enabled");
    drain();
  }
  for (GradientSlot& slot : arena_.slots()) {
    if (is_outside && !slot.parameter.grad().defined() && slot.seen.expired()) {
      slot.is_pending = false;  // nobody has it, so what is put there next is another one
      slot.aside.reset();
    }
    if (is_outside) {
      arena_.lent().forget(slot);
    }
    require_unchanged(slot);
    std::unique_ptr<AccumulationHooks>& hooks = hooks_[slot.index];
    // A parameter that was converted to another type and back has a new node that accumulates its
    // gradient, without our hooks. And a node that works on another stream than the gradients'
    // would wait for their stream in every backward, which would break the capture of a backward
    // into a graph.
    if (!hooks->are_in_place(slot.parameter) || !hooks->are_on_current_stream(slot.parameter)) {
      hooks.reset();  // and with it the old node, if no graph has it
      hooks = make_hooks(slot);
    }
  }
  forward_began_ = now_ns();
  first_node_of_forward_ = next_node();
}

void Reducer::note_changed_buffers(std::size_t first, std::uint64_t digest) {
  Digest all;
  all.add(changed_buffers_);
  all.add(digest);
  changed_buffers_ = all.value();
  const bool is_first = first_changed_buffer_ == 0 || first < first_changed_buffer_;
  first_changed_buffer_ = is_first ? first : first_changed_buffer_;
}

void Reducer::conclude_held() {
  if (!why_lost_.empty()) {
    throw InvalidUsage(why_lost_);
  }
  if (!std::exchange(is_held_, false)) {
    return;
  }
  round_.times->resumed = now_ns();
  close_or_give_up();
  conclude_round(/*learns=*/true);
}

void Reducer::synchronize(const std::function<void()>& require) {
  if (!current_.expired()) {
    throw InvalidUsage("sync_gradients() is called after backward(), not within it");
  }
  await_thrown();
  if (is_held_) {
    conclude_held();
  }
  const c10::AutoGradMode no_grad(false);
  prepare_round(now_ns());
  round_.is_bare = false;
  try {
    require();
    if (const std::optional<std::size_t> replaced = forget_weights_of_nothing()) {
      throw_replaced(arena_.slots()[*replaced]);
    }
    for (GradientSlot& slot : arena_.slots()) {
      take_over_by_hand(slot);
    }
  } catch (...) {
    give_up();
    throw;
  }
  run_round();
}

// A gradient that was put, or written, into `parameter.grad` by hand.
void Reducer::take_over_by_hand(GradientSlot& slot) {
  if (slot.is_pending || !slot.parameter.grad().defined() || is_untouched(slot) ||
      shows_shard(slot) || is_zero(slot)) {
    return;
  }
  if (has_place(slot) && !holds_gradient(slot)) {
    arena_.lent().take_in(slot);
  } else if (options_.sums && is_seen(slot)) {
    throw InvalidUsage(join("the gradient of parameter ", slot.name,
                            " was summed and then changed in place, so part of it may count once "
                            "for each rank: set it to None first, or replace it"));
  }
  slot.is_pending = true;
  note_seen(slot, /*by_value=*/adds_up());
  weights_.has_plain = true;
}

// Says something other than that a round begins. Where others begin one, it fails, and ends here.
void Reducer::say(Opening::Purpose purpose, std::uint64_t options) {
  await_thrown();
  const c10::AutoGradMode no_grad(false);
  drain();
  if (!out_of_step_.empty()) {
    std::rethrow_exception(make_error(ErrorKind::kError, out_of_step_));
  }
  Opening own;
  own.purpose = purpose;
  own.stepping = stepping_;
  own.options = options;
  own.is_present = is_present_;
  own.mode = Opening::Mode::kNothing;
  own.share = 0.0;
  votes_.write(own);
  const WorkPtr work = operations_.submit({.kind = OpKind::kAllGather}, votes_.own(), votes_.all(),
                                          "what ranks say between rounds");
  work->wait_or_end([this] {
    communicator_->abort(Aborted(join("rank ", communicator_->rank(),
                                      " was interrupted while it waited for the others' word")));
  });
  forget();
  if (!votes_.ranks_with(Opening::Purpose::kRound).empty()) {
    openings_ = std::exchange(votes_, Openings(communicator_->rank(), communicator_->size()));
    prepare_round(now_ns());
    round_.opening = work;
    decide_combination();
    give_up();
  }
}

Reducer::Vote Reducer::vote(bool refuses, std::uint64_t options) {
  using Purpose = Opening::Purpose;
  const std::uint64_t round = round_.number;
  say(refuses ? Purpose::kRefuseStep : Purpose::kStep, options);
  const Openings& said = round_.number == round ? votes_ : openings_;
  Vote vote;
  vote.refused = said.ranks_with(Purpose::kRefuseStep);
  vote.went_backward = said.ranks_with(Purpose::kRound);
  std::optional<std::uint64_t> common;
  for (int rank = 0; rank < communicator_->size(); ++rank) {
    const Opening theirs = said.of(rank);
    vote.all_in_step = vote.all_in_step && theirs.stepping == stepping_;
    if (theirs.purpose == Purpose::kStep) {
      vote.options_agree = vote.options_agree && theirs.options == common.value_or(theirs.options);
      common = theirs.options;
    }
  }
  return vote;
}

void Reducer::set_joining(Joining joining, bool throws_on_first) noexcept {
  joining_ = joining;
  throws_on_first_ = throws_on_first;
  is_present_ = true;
  joined_before_ = round_.number;
  if (joining == Joining::kNot) {
    buffers_root_.reset();  // after join() all ranks take over one's whole model
    // Torch's DDP goes on as if it were in join(): with the buffers of the last of all ranks.
    root_outside_join_ = communicator_->size() - 1;
  }
}

bool Reducer::join_round() {
  await_thrown();
  if (is_held_) {
    conclude_held();
  }
  const c10::AutoGradMode no_grad(false);
  is_present_ = false;
  // What was accumulated and never averaged is not part of anybody's step.
  forget_pending();
  weights_ = {};
  prepare_round(now_ns());
  run_round();
  return openings_.present() != 0;
}

void Reducer::leave_join() noexcept {
  try {
    await_thrown();
    drain();
    // Whoever was in a round with a rank that left leaves join() too: nobody is left to be told.
    if (round_.number == joined_before_ ||
        openings_.ranks_with(Opening::Purpose::kLeaveJoin).empty()) {
      say(Opening::Purpose::kLeaveJoin, 0);
    }
  } catch (const std::exception&) {
    // A group that failed has told everybody already.
  }
}

void Reducer::retire(std::string reason) {
  await_thrown();
  if (!current_.expired()) {
    throw InvalidUsage(join("within a backward: ", reason));
  }
  try {
    drain();
  } catch (const Error&) {
    // The group has failed and has told all ranks; nobody needs what was under way.
  }
  const std::lock_guard turn(turn_);
  retired_ = std::move(reason);
  hooks_.clear();
  arena_.let_go();
}

bool Reducer::has_pending() const {
  return std::any_of(arena_.slots().begin(), arena_.slots().end(), &is_still_pending);
}

std::vector<at::Tensor> Reducer::pending() const {
  std::vector<at::Tensor> parameters;
  for (const GradientSlot& slot : arena_.slots()) {
    if (is_still_pending(slot)) {
      parameters.push_back(slot.parameter);
    }
  }
  return parameters;
}

std::vector<at::Tensor> Reducer::accumulated() const {
  const std::lock_guard turn(turn_);
  std::vector<at::Tensor> parameters;
  for (const GradientSlot& slot : arena_.slots()) {
    if (holds_pending(slot)) {
      parameters.push_back(slot.parameter);
    }
  }
  return parameters;
}

}  // namespace pydist
