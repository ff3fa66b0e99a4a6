// What a round is worth, from what all ranks said in its opening and its closing; see Note
// [Rounds].

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "c10d/device_streams.h"
#include "reducer/reducer.h"

namespace pydist {
namespace {

std::string numbers(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) {
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text;
}

}  // namespace

// On any rank.
bool Reducer::has_hook_thrown() const {
  for (int rank = 0; closings_ && rank < communicator_->size(); ++rank) {
    if (closings_->of(rank).status == Closing::Status::kHookThrew) {
      return true;
    }
  }
  return false;
}

// Why the round is worth nothing, from what all ranks said; no message where it is worth something.
ErrorDescription Reducer::why_worthless() const {
  using Mode = Opening::Mode;
  using Purpose = Opening::Purpose;
  using Ranks = std::vector<int>;
  Ranks stepped;
  Ranks refused;
  Ranks left;
  Ranks threw;
  Ranks gave_up;
  Ranks joined;
  Ranks as_one;
  Ranks by_share;
  Ranks mixed;
  for (int rank = 0; rank < communicator_->size(); ++rank) {
    const Closing::Status status = closings_->of(rank).status;
    const Opening opening = openings_.of(rank);
    if (opening.purpose != Purpose::kRound) {
      (opening.purpose == Purpose::kStep        ? stepped
       : opening.purpose == Purpose::kLeaveJoin ? left
                                                : refused)
          .push_back(rank);
    } else if (status != Closing::Status::kFine) {
      (status == Closing::Status::kGivenUp ? gave_up : threw).push_back(rank);
    }
    if (!opening.is_present) {
      joined.push_back(rank);
    } else if (opening.mode != Mode::kNothing) {
      (opening.mode == Mode::kMixed     ? mixed
       : opening.mode == Mode::kByShare ? by_share
                                        : as_one)
          .push_back(rank);
    }
  }
  const auto because_of = [this](const Ranks& ranks, const char* cause, std::string message) {
    Blame blame = communicator_->culprit(ranks[0], cause);
    blame.ranks = ranks;
    return ErrorDescription{ErrorKind::kError, std::move(message), std::move(blame)};
  };
  constexpr const char* kIncomplete = "so the gradients of this step are incomplete on every rank";
  if (!refused.empty()) {
    return because_of(
        refused, "step() raised",
        join("step() of the model's pydist.ShardedOptimizer raised on rank ", numbers(refused),
             " before this rank's backward was over, ", kIncomplete,
             ": the exception is there; set the gradients to zero before the next step"));
  }
  if (!stepped.empty()) {
    return because_of(
        stepped, "called step() instead of a backward",
        join("rank ", numbers(stepped),
             " called step() of the model's pydist.ShardedOptimizer while this rank went "
             "backward, ",
             kIncomplete,
             ": go backward as often on every rank, and set the gradients to zero before the "
             "next step"));
  }
  if (!left.empty()) {
    return because_of(left, "raised within join()",
                      join("an exception was raised on rank ", numbers(left), " within join(), ",
                           kIncomplete, ": the exception is there"));
  }
  if (!threw.empty()) {
    return because_of(threw, "raised in its backward",
                      join("backward raised on rank ", numbers(threw), ", ", kIncomplete,
                           ": the exception is there; ",
                           has_hook_thrown() ? kHooksOutOfStep
                                             : "set the gradients to zero before the next step"));
  }
  if (!gave_up.empty()) {
    return because_of(
        gave_up, "did not conclude its average",
        join("rank ", numbers(gave_up),
             " went backward and did not wait for the average of the gradients, ", kIncomplete,
             ": an exception came in between, such as one in the schedule of a pipeline, or "
             "something else before conclude_average(), such as a forward; set the gradients to "
             "zero before the next step"));
  }
  if (!mixed.empty()) {
    return because_of(
        mixed, "gave weights to some passes only",
        join("of the backward passes that this step accumulates on rank ", numbers(mixed),
             ", some had a weight and some had none: give one to each"));
  }
  if (!as_one.empty() && !by_share.empty()) {
    return because_of(
        by_share, "gave a weight where others gave none",
        join("rank ", numbers(by_share), " gave this backward a weight and rank ", numbers(as_one),
             " did not, so there is no average: give one on all ranks (0 where a batch counts "
             "for nothing), and set the gradients to zero before the next step"));
  }
  if (throws_on_first_ && !joined.empty() && openings_.present() != 0) {
    return because_of(joined, "has no more batches",
                      join("rank ", numbers(joined),
                           " has no more batches, and join() was told to stop then "
                           "(throw_on_early_termination=True)"));
  }
  return {};
}

// Remembers that the round is captured: when it is given up later, that may be on another thread,
// or after the capture, where nothing tells any more.
void Reducer::note_capture() { round_.is_captured = round_.is_captured || is_capturing(); }

// Whether some ranks captured the round and others did not, on a backend whose operations a graph
// can hold.
bool Reducer::is_captured_by_some() const {
  return !communicator_->capabilities().needs_host && closings_->any(&Closing::is_captured) &&
         !closings_->all(&Closing::is_captured);
}

bool Reducer::is_capturing() const {
  const std::optional<Device> device = arena_.device();
  return device && pydist::is_capturing(current_stream(*device));
}

std::string Reducer::why_not_captured() const {
  const auto because = [](const std::string& what) {
    return "this step cannot be captured into a CUDA graph, which would repeat the averaging of "
           "gradients without what the ranks' hosts tell each other: " +
           what;
  };
  for (int rank = 0; rank < communicator_->size(); ++rank) {
    if (!closings_->of(rank).is_captured) {
      return because(join("rank ", rank, " does not capture it; do so on all ranks"));
    }
    if (openings_.of(rank).mode != Opening::Mode::kAsOne) {
      return because(join("rank ", rank, " gave it a weight, or is in join()"));
    }
  }
  if (buffers_ && buffers_->memory.numel() != 0) {
    return because(
        "buffers of the module would be exchanged; wrap it with broadcast_buffers=False");
  }
  if (policy_->is_of_program()) {
    return because("a communication hook averages the gradients");
  }
  if (options_.checks_gradients) {
    return because("PYDIST_DEBUG compares gradients after each step");
  }
  for (const GradientSlot& slot : arena_.slots()) {
    if (slot.owner != 0) {
      return because("a ShardedOptimizer takes the gradients");
    }
    if (slot.is_sparse) {
      return because("the gradient of " + slot.name + " is sparse");
    }
    if (!has_place(slot)) {
      return because(slot.name + " joined the model in this step; run one more before");
    }
    if (closings_->is_late(slot.index)) {
      return because("the gradient of " + slot.name +
                     " came in parts, after its bucket had left; run more steps before");
    }
    if (closings_->used(slot.index) != communicator_->size()) {
      return because(join(slot.name, " got a gradient on ", closings_->used(slot.index), " of ",
                          communicator_->size(), " ranks; freeze what is not used"));
    }
  }
  return {};
}

}  // namespace pydist
