// How an NCCL group is watched: what has finished, and what is wrong; see Note [Two threads that
// look] in nccl_group.h.

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "communicator/nccl/kept_buffers.h"
#include "communicator/nccl/nccl_group.h"
#include "communicator/nccl/nccl_launched_work.h"
#include "communicator/nccl/nccl_watchdog.h"
#include "topology/hosts.h"

namespace pydist {
namespace {

using nccl::Result;
using std::chrono::milliseconds;

// How long an error waits for the driver to say which operations had finished before it.
constexpr milliseconds kWordPatience{100};

constexpr milliseconds kIdle = milliseconds::max();

// How late the end of an operation is noticed, and so how long its buffers are kept if nobody waits
// for it. Also how late a failure is noticed while only graphs are replayed.
constexpr milliseconds kWatchInterval{2};
constexpr milliseconds kReplayInterval{50};
// How late memory goes back that was kept because the GPU was not done with it.
constexpr milliseconds kKeptInterval{200};

}  // namespace

void NcclGroup::settle_done() {
  // One thread at a time asks, and without the lock of the group: the driver may keep it waiting,
  // for as long as an operation hangs, and the others have to be able to end that.
  std::unique_lock settling(settle_mutex_, std::try_to_lock);
  if (!settling.owns_lock()) {
    return;
  }
  std::vector<UnderWay> done;
  std::vector<Work::Notice> notices;
  std::exception_ptr broken;
  try {
    while (true) {
      std::shared_ptr<LaunchedWork> first;
      {
        const std::lock_guard lock(mutex_);
        if (failure_.is_set() || under_way_.empty()) {
          break;
        }
        first = under_way_.front().work;
      }
      if (!first->event().is_done()) {
        break;
      }
      const std::lock_guard lock(mutex_);
      if (failure_.is_set() || under_way_.empty()) {
        break;  // the thread that ends the group finishes the operation
      }
      done.push_back(std::move(under_way_.front()));
      under_way_.pop_front();
    }
    ++settled_;
  } catch (...) {
    broken = std::current_exception();  // of CUDA, sticky; those before it have come to their end
  }
  for (UnderWay& each : done) {
    KeptBuffers::of_process().let_go(std::move(each.holding));
    if (journal_ != nullptr) {
      journal_->finish(each.ticket, JournalState::kSucceeded);
    }
    notices.push_back(each.work->settle(nullptr));
  }
  settling.unlock();
  for (const Work::Notice& notice : notices) {
    notice.deliver();
  }
  rethrow_if_any(broken);
}

Result NcclGroup::async_state() const {
  Result state = Result::kInProgress;
  const Result asked = api_->functions().ncclCommGetAsyncError(comm_, &state);
  return asked == Result::kSuccess ? state : asked;
}

std::exception_ptr NcclGroup::failure_of_others() const {
  if (std::exception_ptr error = control_->failure()) {
    return error;
  }
  return companion_ == nullptr ? nullptr : companion_->failure();
}

std::pair<std::string, Blame> NcclGroup::not_launched(std::uint64_t sequence) const {
  std::string names;
  Blame blame;
  // Ranks may have recorded unlike numbers of operations into graphs.
  if (!has_captured_) {
    for (const int rank : news_.not_begun(fingerprint_, sequence)) {
      const Blame found = control_->culprit(rank, "has not launched it");
      names += pydist::join(names.empty() ? "" : ", ", "rank ", rank, " (",
                            name_of_process(found.pid, found.host), ")");
      if (blame.ranks.empty()) {
        blame = found;
      } else {
        blame.ranks.push_back(rank);
      }
    }
  }
  return {std::move(names), std::move(blame)};
}

std::string NcclGroup::warning_of(const std::string& title, std::uint64_t sequence) const {
  const std::string names = not_launched(sequence).first;
  const Blame own = control_->culprit(rank(), {});
  std::string why = names.empty() ? "" : "not launched by " + names;
  for (const std::string& place : control_->whereabouts()) {
    why += (why.empty() ? "" : "; ") + place;
  }
  return long_wait_text(
      pydist::join("rank ", rank(), " (", name_of_process(own.pid, own.host), ")"),
      pydist::join(title, " of group '", control_->name(), "'"), long_wait_, why);
}

std::exception_ptr NcclGroup::timeout_of(const UnderWay& late) const {
  auto [names, blame] = not_launched(late.sequence);
  if (blame.ranks.empty()) {
    blame.cause = "did not finish on the GPU in time";
  }
  blame.operation = pydist::join(late.title(), " of group '", control_->name(), "'");
  return make_error(ErrorKind::kTimeout,
                    pydist::join(late.title(), " on rank ", rank(), " of ", size(), " of group '",
                                 control_->name(), "' did not finish on the GPU in time",
                                 names.empty() ? "" : ", not launched by ", names, "."),
                    blame);
}

std::chrono::milliseconds NcclGroup::settle() noexcept {
  if (in_forked_child()) {
    return kIdle;
  }
  try {
    const cuda::DeviceGuard guard(device_);
    const cuda::RelaxedCapture relaxed;
    settle_done();
    if (is_under_way() && is_at_rest()) {
      finish_all(/*is_quiet=*/true);
    }
  } catch (...) {
    // CUDA itself: an illegal address, a lost device.
    fail(std::current_exception());
  }
  KeptBuffers::of_process().release();
  if (is_under_way()) {
    return kWatchInterval;
  }
  return KeptBuffers::of_process().is_empty() ? kIdle : kKeptInterval;
}

bool NcclGroup::has_word() {
  if (under_way_.empty()) {
    return true;
  }
  if (!word_until_) {
    word_until_ = Deadline::in(kWordPatience);
    word_after_ = settled_ + 2;  // the next may be under way
  }
  return settled_ >= word_after_ || word_until_->has_passed();
}

std::chrono::milliseconds NcclGroup::watch() noexcept {
  if (in_forked_child()) {
    return kIdle;
  }
  try {
    bool is_late = false;
    {
      std::unique_lock lock(mutex_);
      if (life_.has_begun_to_end()) {
        if (!under_way_.empty() && ending_until_.has_passed()) {
          lock.unlock();
          log_line(LogLevel::kError, pydist::join("NCCL did not abort group '", control_->name(),
                                                  "' in time; it is left to itself."));
          finish_all(/*is_quiet=*/false);  // nobody here asks the driver
          return kIdle;
        }
        return under_way_.empty() ? kIdle : kWatchInterval;
      }
      // A graph may be replayed at any time.
      if (under_way_.empty() && !has_captured_) {
        return kIdle;
      }
      is_late = std::any_of(under_way_.begin(), under_way_.end(),
                            [](const UnderWay& each) { return each.deadline.has_passed(); });
    }
    // Without the lock: others may have to wait for the answers.
    const std::exception_ptr told = failure_of_others();
    const std::optional<Absence> absence = news_.absence();
    std::exception_ptr error;
    std::pair<std::string, std::uint64_t> lasting;
    milliseconds pause = kWatchInterval;
    {
      const std::lock_guard lock(mutex_);
      if (life_.has_begun_to_end()) {
        return kWatchInterval;
      }
      pause = under_way_.empty() ? kReplayInterval : kWatchInterval;
      error = find_fault(told, absence);
      if (error == nullptr && is_late && !under_way_.empty()) {
        error = timeout_of(under_way_.front());
      }
      if (error == nullptr && !under_way_.empty() &&
          under_way_.front().long_wait.is_due(long_wait_)) {
        lasting = {under_way_.front().title(), under_way_.front().sequence};
      }
      if (error == nullptr) {
        word_until_.reset();
      } else if (!has_word()) {
        return kWatchInterval;
      }
    }
    if (error != nullptr) {
      // A time-out that this rank is the first to notice says where the other ranks are.
      if (const auto [kind, what, blame] = describe(error);
          kind == ErrorKind::kTimeout && error != told) {
        error = make_error(kind, what + places(), blame);
      }
      fail(error);
    } else if (!lasting.first.empty() && watchdog_ != nullptr) {
      watchdog_->log().post(LogLevel::kWarning, warning_of(lasting.first, lasting.second));
    }
    return pause;
  } catch (...) {
    fail(std::current_exception());
    return kWatchInterval;
  }
}

// What is wrong, under the lock; null if nothing.
std::exception_ptr NcclGroup::find_fault(const std::exception_ptr& told,
                                         const std::optional<Absence>& absence) {
  const std::string title =
      under_way_.empty() ? std::string("a collective of a CUDA graph") : under_way_.front().title();
  const auto says = [&](const std::string& what) {
    return pydist::join(title, " on rank ", rank(), " of ", size(), " of group '", control_->name(),
                        "' failed: ", what);
  };
  Result state = Result::kSuccess;
  if (const std::unique_lock calls(calls_mutex_, std::try_to_lock); calls.owns_lock()) {
    state = async_state();
  }
  // A missing rank explains NCCL's error, and the message names the rank. A rank that has left in
  // order does no harm to operations in which it did its part, nor to earlier replays.
  const bool is_vain = absence && (under_way_.empty() ? !absence->is_orderly
                                                      : absence->lacks(under_way_.front().turn) ||
                                                            may_be_of_a_peer(state));
  if (!is_vain) {
    vain_until_.reset();
  } else if (!vain_until_) {
    vain_until_ = Deadline::in(kVainPatience);
  }
  if (is_vain && vain_until_->has_passed()) {
    Blame blame = absence->blame;
    blame.operation = pydist::join(title, " of group '", control_->name(), "'");
    return make_error(absence->kind, says(absence->what + "."), blame);
  }
  if (told != nullptr) {
    return told;
  }
  if (state == Result::kSuccess || state == Result::kInProgress) {
    name_until_.reset();
    return nullptr;
  }
  if (!name_until_) {
    name_until_ = Deadline::in(may_be_of_a_peer(state) ? name_patience_ : milliseconds::zero());
    if (!under_way_.empty()) {
      name_until_ = name_until_->earlier_of(under_way_.front().deadline);
    }
  }
  return !is_vain && name_until_->has_passed() ? api_->error_of(state, says("a collective"), comm_)
                                               : nullptr;
}

}  // namespace pydist
