// How a rank leaves a round that it cannot end: so that no other rank waits for it, and every one
// knows that the round is worth nothing. See Note [Rounds].

#include <c10/core/GradMode.h>

#include <exception>
#include <string>
#include <utility>

#include "base/error.h"
#include "reducer/reducer.h"

namespace pydist {
namespace {

// Of the exception that is being handled.
std::string what_happened() {
  try {
    throw;
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an unknown exception";
  }
}

}  // namespace

// Sends the other ranks everything that they wait for, and tells them in the closing that it is
// worth nothing.
void Reducer::give_up(Closing::Status status) noexcept {
  try {
    const c10::AutoGradMode no_grad(false);
    if (round_.opening == nullptr) {
      open_round();
    }
    // Then nobody waits for this rank's buckets: the other ranks have only recorded theirs too, or
    // the closing ends the group.
    const Capabilities can = communicator_->capabilities();
    const bool is_recorded_only = round_.is_captured && !can.needs_host;
    if (!round_.combination && can.takes_device_factors && !is_recorded_only) {
      // Only the openings tell whether the others sum weights on their devices first.
      decide_combination();
    } else if (!round_.combination) {
      // Decided without waiting for the others' openings. They come to the same operation, so all
      // ranks stay in step.
      const bool is_by_share = weights_.has_weighted || joining_ == Joining::kNotAtAll;
      round_.combination = {is_by_share     ? ReduceOp::kPremulSum
                            : options_.sums ? ReduceOp::kSum
                                            : ReduceOp::kMean,
                            0.0};
    }
    if (is_recorded_only) {
      round_.launched = arena_.buckets().size();
    }
    launch_rest(status);
    if (!round_.is_closed) {
      hand_over_sparse(status);
      close_round(status);
    }
  } catch (const std::exception& error) {
    // The caller sees the error of the backward; a group that failed has told everybody already.
    try {
      if (communicator_->failure() == nullptr) {
        communicator_->abort(
            Aborted(join("rank ", communicator_->rank(),
                         " fell out of step after an exception in its backward: ", error.what())));
      }
    } catch (const std::exception&) {
      // In a forked child, which is none of the ranks.
    }
  }
  order_.drop_round();
  orphan();
}

void Reducer::give_up_held() noexcept {
  if (std::exchange(is_held_, false)) {
    give_up(Closing::Status::kGivenUp);
  }
}

// For a round that was not concluded before this rank begins anything else. The program has yet to
// hear of it.
void Reducer::lose_held(const char* to) {
  if (is_held_) {
    why_lost_ = join("the average of the last backward's gradients was given up on rank ",
                     communicator_->rank(), ", because ", to,
                     " came before conclude_average(): call that first; set the gradients to zero, "
                     "and go forward and backward again");
    give_up_held();
  }
}

// For a rank that cannot begin a round, or not complete it, because a wait was interrupted, say.
// The others have gone on, or wait for it. Called while the exception is handled.
void Reducer::fall_out_of_step() {
  const std::string what = what_happened();
  out_of_step_ = join("averaging was cut short in an earlier backward (", what,
                      "), so this rank's model may differ from the others': load a checkpoint on "
                      "all ranks, and wrap the module anew");
  communicator_->abort(
      Aborted(join("rank ", communicator_->rank(), " left while it averaged gradients: ", what)));
}

// The same, amid a round.
void Reducer::break_off() {
  fall_out_of_step();
  order_.drop_round();
  orphan();
}

// Called before the group ends for a reason that all ranks can see in the closings. A rank that has
// not looked at them yet would find the group ended without a reason.
void Reducer::let_all_hear() noexcept {
  try {
    // Not a barrier, which waits for devices too.
    const at::Tensor& memory = closings_->memory();
    operations_
        .submit({.kind = OpKind::kAllReduce}, memory, memory,
                "all ranks have heard why a round failed")
        ->wait();
  } catch (const std::exception&) {
    // A rank that is gone has heard the reason, or never will.
  }
}

// Note [Beside the program]
// On GPUs the exception of a backward reaches the program before autograd's thread has released the
// backward, which gives its round up. So the program may set gradients to None at the same time:
// whatever looks at them then does so while no user code runs, a short time each, and waits for no
// other rank meanwhile.
void Reducer::beside_program(const std::function<void()>& function) {
  if (program_goes_on_) {
    options_.among_users(function);
  } else {
    function();
  }
}

// Begins a new round while operations of this one still write into the arena. So the gradients,
// which are worth nothing, are taken out of it: the next ones land there after drain().
void Reducer::orphan() {
  restart();
  forget_pending();
  options_.among_users([this] {
    for (const GradientSlot& slot : arena_.slots()) {
      slot.parameter.mutable_grad().reset();
    }
    // The memory may be released already now, because nobody takes it before drain().
    arena_.release();
  });
}

}  // namespace pydist
