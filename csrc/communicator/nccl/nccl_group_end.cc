// How an NCCL group fails and ends; see Note [How a group fails] in nccl_group.h.

#include <atomic>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "communicator/departure.h"
#include "communicator/nccl/kept_buffers.h"
#include "communicator/nccl/late_ends.h"
#include "communicator/nccl/nccl_group.h"
#include "communicator/nccl/nccl_launched_work.h"
#include "communicator/nccl/nccl_watchdog.h"
#include "communicator/nccl/streams_of_process.h"
#include "topology/told_error.h"

namespace pydist {
namespace {

using nccl::Result;
using std::chrono::microseconds;
using std::chrono::milliseconds;

}  // namespace

std::exception_ptr NcclGroup::failure() const {
  if (!failure_.is_set()) {
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  return failure_.error();
}

void NcclGroup::fail(const std::exception_ptr& error) noexcept {
  if (in_forked_child()) {
    return;
  }
  const auto [kind, what, named] = describe(error);
  const Blame blame = blame_of(Error(kind, what, named), rank());
  bool is_unheard = false;
  bool has_to_abort = false;
  bool has_joined = false;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.set(kind, what, rank(), blame)) {
      return;
    }
    has_joined = life_.has_joined();
    is_unheard = has_captured_ || !under_way_.empty();
    has_to_abort = begin_end();
  }
  if (is_unheard) {
    // Logged at once: the streams go on with results that are worth nothing, and it may be long
    // until the program asks the group for anything.
    log_line(LogLevel::kError,
             pydist::join(what, " What the GPU computes from here on is worth nothing."));
  }
  const auto tell = [reason = Error(kind, what, blame)](Communicator& group) {
    log_errors_of([&] { group.abort(reason); });
  };
  tell(*control_);
  if (has_to_abort) {
    end_on_thread([this] { abort_communicator(); });
  }
  // Last: a callback may wait for operations that NCCL has under way.
  if (companion_ != nullptr && has_joined) {
    tell(*companion_);
  }
}

void NcclGroup::abort_communicator() {
  wait_for_launches();
  if (comm_ == nullptr) {
    return;
  }
  const cuda::DeviceGuard guard(device_);
  const cuda::RelaxedCapture relaxed;
  step_to(LifeStep::kAborting);
  static_cast<void>(api_->functions().ncclCommAbort(comm_));
  // The kernels have been told to end. The callers that wait will get back the buffers that the
  // kernels use. A captured stream can't be asked, and nothing that is captured runs.
  const Deadline patience = Deadline::in(end_patience_ / 2);
  while (!cuda::Driver::get().is_capturing(stream()) && !cuda::Driver::get().is_idle(stream()) &&
         !patience.has_passed()) {
    std::this_thread::sleep_for(microseconds(100));
  }
}

bool NcclGroup::begin_end() {
  if (life_.has_begun_to_end()) {
    return false;
  }
  life_.step_to(LifeStep::kEnding);
  ending_until_ = Deadline::in(end_patience_);
  return true;
}

void NcclGroup::step_to(LifeStep next) {
  const std::lock_guard lock(mutex_);
  life_.step_to(next);
}

void NcclGroup::end_on_thread(std::function<void()> end) noexcept {
  const std::lock_guard lock(mutex_);
  std::string complaint = pydist::join("NCCL's communicator of group '", control_->name(),
                                       "' does not end; it is left to itself.");
  if (has_captured_) {
    complaint +=
        " It waits for the CUDA graphs that hold its operations: drop them before shutdown().";
  }
  try {
    auto run = [self = shared_from_this(), end = std::move(end)] {
      log_errors_of(end);
      self->step_to(LifeStep::kEnded);
      self->finish_all(self->is_at_rest());
      self->free_scratch();
    };
    LateEnds::of_process().start("pydist-nccl-end", std::move(run), ending_until_,
                                 std::move(complaint));
  } catch (const std::exception& error) {  // no thread to be had, or nobody holds the group
    log_line(LogLevel::kError, pydist::join("NCCL's communicator of group '", control_->name(),
                                            "' is left to itself: ", error.what()));
    ending_until_ = Deadline::in(milliseconds::zero());
  }
  if (watchdog_ != nullptr) {
    watchdog_->wake();
  }
}

bool NcclGroup::is_under_way() const {
  const std::lock_guard lock(mutex_);
  return !under_way_.empty();
}

bool NcclGroup::is_at_rest() const noexcept {
  const LifeStep step = life_.now();
  // NCCL may go on with a launch that was broken off until its abort returns.
  if (step != LifeStep::kEnded && (step != LifeStep::kAborting || has_broken_off_)) {
    return false;
  }
  try {
    return stream_ == nullptr || is_idle(*stream_, device_);
  } catch (const std::exception&) {
    return false;  // CUDA itself has failed
  }
}

bool NcclGroup::wait_until_quiet(Deadline deadline) const noexcept {
  while (!is_at_rest()) {
    if (has_ended() || deadline.has_passed()) {
      return false;
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

void NcclGroup::keep_unless_quiet(KeptBuffers::Holding holding, Deadline deadline) noexcept {
  // What is captured holds nothing, and its stream is not quiet before the capture has ended.
  if (!holding.empty() && failure_.is_set() && !wait_until_quiet(deadline)) {
    keep(std::move(holding));
  }
}

void NcclGroup::keep(KeptBuffers::Holding holding) noexcept {
  if (holding.empty()) {
    return;
  }
  try {
    log_line(LogLevel::kWarning,
             pydist::join("NCCL has not been able to end what the group '", control_->name(),
                          "' had under way on cuda:", device_,
                          ", or has not said so in time. So the memory of its tensors there, ",
                          KeptBuffers::bytes_of(holding),
                          " bytes, is kept until the GPU is done with it, or the process ends: it "
                          "may still be read and written."));
  } catch (const std::exception&) {
    // No memory left for the words.
  }
  KeptBuffers::of_process().keep(std::move(holding));
  if (watchdog_ != nullptr) {
    watchdog_->wake();
  }
}

void NcclGroup::wait_for_end(Deadline deadline) const noexcept {
  {
    const std::lock_guard lock(mutex_);
    deadline = life_.has_begun_to_end() ? deadline.earlier_of(ending_until_)
                                        : Deadline::in(milliseconds::zero());
  }
  while (!has_ended() && !deadline.has_passed()) {
    std::this_thread::sleep_for(milliseconds(1));
  }
}

void NcclGroup::finish_all(bool is_quiet) noexcept {
  std::deque<UnderWay> all;
  {
    const std::lock_guard lock(mutex_);
    all.swap(under_way_);
  }
  KeptBuffers::Holding holding;
  for (UnderWay& each : all) {
    holding.splice(holding.end(), each.holding);
  }
  // Before the callers drop theirs.
  if (is_quiet) {
    KeptBuffers::of_process().let_go(std::move(holding));
  } else {
    keep(std::move(holding));
  }
  for (const UnderWay& each : all) {
    if (journal_ != nullptr) {
      journal_->finish(each.ticket, JournalState::kFailed);
    }
    each.work->finish(failure());
  }
  // Their waiters may be looking at the errors; the last to go lets go of them.
  const std::lock_guard lock(mutex_);
  std::move(all.begin(), all.end(), std::back_inserter(given_up_));
}

void NcclGroup::drain(Deadline deadline) {
  while (true) {
    std::shared_ptr<LaunchedWork> last;
    {
      const std::lock_guard lock(mutex_);
      if (!under_way_.empty()) {
        last = under_way_.back().work;
      }
    }
    if (last == nullptr || deadline.has_passed()) {
      return;
    }
    last->wait_quietly(deadline);
  }
}

// Ends NCCL's communicator in good order, or aborts it if the orderly end takes too long.
void NcclGroup::end_communicator() {
  const cuda::DeviceGuard guard(device_);
  const cuda::RelaxedCapture relaxed;
  {
    const std::lock_guard calls(calls_mutex_);
    step_to(LifeStep::kFinalizing);
  }
  const nccl::Functions& nccl = api_->functions();
  const Deadline patience = Deadline::in(end_patience_ / 2);
  Result state = nccl.ncclCommFinalize(comm_);
  while (state == Result::kInProgress && !patience.has_passed()) {
    std::this_thread::sleep_for(microseconds(200));
    state = async_state();
  }
  // NCCL cannot destroy a communicator that has failed or is busy.
  if (state == Result::kSuccess) {
    static_cast<void>(nccl.ncclCommDestroy(comm_));
  } else {
    step_to(LifeStep::kAborting);
    static_cast<void>(nccl.ncclCommAbort(comm_));
  }
}

void NcclGroup::end() noexcept {
  if (is_shut_down_.exchange(true)) {
    return;
  }
  const Deadline deadline = Deadline::in(end_patience_);
  // In this order: a launched operation counts as under way before its launch is over.
  const auto is_quiet = [this] { return !is_launching_ && !is_under_way(); };
  while (!is_quiet() && failure() == nullptr && !deadline.has_passed()) {
    settle();
    watch();
    std::this_thread::sleep_for(microseconds(200));
  }
  if (!is_quiet()) {
    fail(make_error(ErrorKind::kAborted,
                    pydist::join("The group '", control_->name(), "' was shut down on rank ",
                                 rank(), " while an operation was under way."),
                    own_blame(rank(), in_words(own_departure()))));
  }
  bool has_come_to_rest = true;
  bool is_in_order = false;
  std::optional<Deadline> aborted_by;
  {
    const std::lock_guard lock(mutex_);
    if (failure_.is_set()) {
      aborted_by = ending_until_;  // by the thread that told of the failure, or is about to
    } else {
      is_in_order = comm_ != nullptr && !weak_from_this().expired() && begin_end();
    }
  }
  if (is_in_order) {
    end_on_thread([this] { end_communicator(); });
  } else if (aborted_by) {
    has_come_to_rest = wait_until_quiet(*aborted_by);
  }
  finish_all(has_come_to_rest);
  has_captured_ = false;  // nobody asks for faults any more
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.is_set()) {
      news_.set_farewell(turn_);
    }
  }
  control_->shutdown();
}

}  // namespace pydist
