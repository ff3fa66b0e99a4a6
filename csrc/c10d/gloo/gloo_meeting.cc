#include "c10d/gloo/gloo_meeting.h"

#include <chrono>
#include <thread>
#include <utility>

#include "base/interruption.h"
#include "c10d/gloo/gloo_group.h"
#include "communicator/departure.h"
#include "health/process_state.h"
#include "topology/told_error.h"

namespace pydist {
namespace {

// How long a process whose connections are cut may take to be known as dead.
constexpr std::chrono::milliseconds kDyingPatience{300};

}  // namespace

GlooMeeting::GlooMeeting(StorePtr store, int rank, std::string name, KnownProcesses processes,
                         CheckHope check_hope)
    : store_(std::move(store)),
      rank_(rank),
      name_(std::move(name)),
      processes_(std::move(processes)),
      check_hope_(std::move(check_hope)) {}

void GlooMeeting::say_here(Deadline deadline) {
  // A store whose host is stopped is to be told here: torch's gloo would ask it without limit.
  const std::string key = GlooGroup::place_key(rank_);
  store_->set(key, own_place());
  run([&] { static_cast<void>(store_->get(key, deadline)); });
  // Gloo would still find the addresses of those that have given up since.
  if (const std::optional<ToldError> told = GlooGroup::told_failure(*store_)) {
    throw_described(told->error);
  }
}

void GlooMeeting::check_hope() {
  try {
    if (check_hope_) {
      check_hope_();
    }
    run(&check_interruption);
  } catch (...) {
    lost_ = std::current_exception();
    throw TransportError("The ranks did not meet.");
  }
}

void GlooMeeting::tell_and_throw_why() {
  const std::exception_ptr error = first_error();
  ErrorDescription why = describe(error);
  if (why.kind == ErrorKind::kPeerLost && why.blame.ranks.empty()) {
    why = end_of_peer(std::move(why));
  }
  // What the caller or the user did stays this rank's own error, whatever another one has told.
  const bool is_mistake = why.kind == ErrorKind::kError || why.kind == ErrorKind::kInvalidUsage;
  if (const auto told = GlooGroup::told_failure(*store_); told && !is_mistake) {
    throw_described(told->error);
  }
  if (why.kind == ErrorKind::kTimeout && why.blame.ranks.empty()) {
    if (const std::vector<int> late = missing(); !late.empty()) {
      why = lateness(processes_, name_, late);
    }
  }
  const bool is_of_others = why.kind == ErrorKind::kTimeout || why.kind == ErrorKind::kPeerLost ||
                            (why.kind == ErrorKind::kAborted && !why.blame.ranks.empty());
  // The others wait for this rank, which will not come.
  GlooGroup::tell_of_failure(*store_, {rank_, is_of_others ? why : own_failure(why)});
  std::rethrow_exception(
      why.kind == ErrorKind::kError ? error : make_error(why.kind, why.message, why.blame));
}

std::exception_ptr GlooMeeting::first_error() const {
  std::exception_ptr error = std::current_exception();
  if (lost_ != nullptr || interruption_ != nullptr) {
    return lost_ != nullptr ? lost_ : error;
  }
  const ErrorDescription what = describe(error);
  const bool is_of_gloo = what.kind == ErrorKind::kTransport || what.kind == ErrorKind::kError ||
                          what.kind == ErrorKind::kPeerLost;
  if (check_hope_ && is_of_gloo && what.blame.ranks.empty()) {
    try {
      check_hope_();
    } catch (const std::exception&) {
      return std::current_exception();
    }
  }
  return error;
}

std::vector<int> GlooMeeting::missing() const {
  std::vector<int> missing;
  std::vector<int> stuck;
  for (int peer = 0; peer < static_cast<int>(processes_.size()); ++peer) {
    if (peer == rank_) {
      continue;
    }
    try {
      if (!look_up(*store_, GlooGroup::place_key(peer))) {
        missing.push_back(peer);
      }
    } catch (const std::exception&) {
      break;  // the store is gone
    }
    if (!in_words(processes_[static_cast<std::size_t>(peer)].state()).empty()) {
      stuck.push_back(peer);
    }
  }
  return missing.empty() ? stuck : missing;
}

ErrorDescription GlooMeeting::end_of_peer(ErrorDescription otherwise) const {
  // The system closes its connections a moment before it says that a process has ended; and one
  // that gave up says why at about that time.
  const Deadline patience = Deadline::in(kDyingPatience);
  while (!patience.has_passed() && !GlooGroup::told_failure(*store_)) {
    for (const KnownProcess& each : processes_) {
      if (each.state() == ProcessState::kDead) {
        return {ErrorKind::kPeerLost, each.who() + " has died before the group was made.",
                each.blame("has died")};
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return otherwise;
}

ErrorDescription GlooMeeting::own_failure(ErrorDescription& why) const {
  const KnownProcess& self = processes_[static_cast<std::size_t>(rank_)];
  if (interruption_ != nullptr) {
    why.message = join("it was interrupted (", kWhatInterrupts, ").");
  }
  why.blame = self.blame(interruption_ != nullptr ? "was interrupted" : why.message);
  return {interruption_ != nullptr ? ErrorKind::kAborted : ErrorKind::kTransport,
          join(self.who(), " could not join the group '", name_, "': ", why.message,
               on_numbers(processes_)),
          why.blame};
}

}  // namespace pydist
