#include "communicator/native/collective_queue.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/interruption.h"
#include "base/log.h"
#include "collectives/shared_memory/small_at_once.h"
#include "communicator/native/wait_check.h"

namespace pydist {
namespace {

// Looks at the posts of peers before an operation gives up on being done at once: a few
// microseconds.
constexpr unsigned kLooksAtOnce = 128;

// How long the fence of a failed group waits for ranks that write into this one's memory and are
// not known to be stopped. A copy of gigabytes takes as long.
constexpr std::chrono::seconds kFencePatience{2};

std::size_t journaled_bytes(const Operation& operation) {
  std::size_t bytes = 0;
  for (const auto* buffers : {&operation.inputs, &operation.outputs}) {
    if (bytes == 0) {
      for (const Buffer& buffer : *buffers) {
        bytes += buffer.bytes();
      }
    }
  }
  return bytes;
}

}  // namespace

CollectiveQueue::CollectiveQueue(std::shared_ptr<ProgressThread> progress,
                                 std::shared_ptr<GroupHealth> health, Group& group,
                                 MakeTask make_task, MakeCall make_call,
                                 std::function<void()> fence_heap, bool runs_at_once)
    : WaitableDrivable(std::move(progress)),
      health_(std::move(health)),
      group_(group),
      make_task_(std::move(make_task)),
      make_call_(std::move(make_call)),
      fence_heap_(std::move(fence_heap)),
      runs_at_once_(runs_at_once) {}

WorkPtr CollectiveQueue::enqueue(Operation operation, Deadline deadline,
                                 const MakeTask* make_task) {
  WorkPtr work = make_work();
  auto pending = std::make_unique<Pending>(std::move(operation), deadline, work, make_task);
  prepare();
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(pending));
    pending_count_.fetch_add(1);
  }
  hand_over();
  return work;
}

WorkPtr CollectiveQueue::make_work() {
  return std::make_shared<NativeWork>(
      std::static_pointer_cast<WaitableDrivable>(shared_from_this()));
}

void CollectiveQueue::run(Operation&& operation, std::chrono::nanoseconds timeout) {
  Right right = try_attend();
  const bool is_first = right && !has_work();
  std::optional<Journal::Ticket> ticket;
  if (is_first) {
    bool is_done = false;
    try {
      is_done = try_at_once(operation, ticket);
    } catch (...) {
      leave(std::move(right));
      throw;
    }
    if (is_done) {
      leave(std::move(right));
      group_.ring_after_fence();
      return;
    }
  } else if (right) {
    right.unlock();
  }
  const Deadline deadline = operation.deadline ? *operation.deadline : Deadline::in(timeout);
  if (!is_first) {
    const OpKind kind = operation.kind;
    wait_for(*enqueue(std::move(operation), deadline, /*make_task=*/nullptr), kind);
    return;
  }
  std::unique_ptr<Pending> pending;
  try {
    pending = std::make_unique<Pending>(std::move(operation), deadline, /*the_work=*/nullptr,
                                        /*the_make_task=*/nullptr);
  } catch (...) {
    // Peers may have seen the post already, and go on without this rank.
    if (ticket) {
      fail_begun(ticket);
    }
    leave(std::move(right));
    throw;
  }
  pending->ticket = ticket;
  pending->is_posted = ticket.has_value();
  run_here(std::move(right), std::move(pending));
}

void CollectiveQueue::run_with(const MakeTask& make_task, Operation operation, Deadline deadline) {
  const OpKind kind = operation.kind;
  Right right = try_attend();
  if (!right || has_work()) {
    if (right) {
      right.unlock();
    }
    wait_for(*enqueue(std::move(operation), deadline, &make_task), kind);
    return;
  }
  run_here(std::move(right), std::make_unique<Pending>(std::move(operation), deadline,
                                                       /*the_work=*/nullptr, &make_task));
}

bool CollectiveQueue::try_at_once(const Operation& operation,
                                  std::optional<Journal::Ticket>& ticket) {
  if (!runs_at_once_ || health_->has_failed()) {
    return false;
  }
  const Call call = make_call_(operation);
  AtOnce at_once(group_, call);
  // Where ranks share cores, a spinning one would keep the core from the one that it waits for.
  const unsigned looks = may_spin() ? kLooksAtOnce : 1;
  if (!at_once.may_post(looks)) {
    return false;
  }
  group_.begin();
  bool is_done = false;
  try {
    // First of all: a rank that is stopped once peers can see its post has entered.
    ticket = note_begin(operation);
    at_once.post();
    is_done = at_once.try_finish(looks);
  } catch (...) {
    fail_begun(ticket);
    std::rethrow_exception(health_->failure());
  }
  if (is_done) {
    health_->journal().finish(*ticket, JournalState::kSucceeded);
  }
  return is_done;
}

void CollectiveQueue::fail_begun(const std::optional<Journal::Ticket>& ticket) {
  if (!health_->has_failed()) {
    health_->fail(std::current_exception());
  }
  if (ticket) {
    health_->journal().finish(*ticket, JournalState::kFailed);
  }
}

void CollectiveQueue::run_here(Right right, std::unique_ptr<Pending> pending) {
  const OpKind kind = pending->operation.kind;
  Pending& here = *pending;
  running_here_ = &here;
  attend_until([&here] { return here.is_done; }, kInterruptionInterval);
  running_here_ = nullptr;
  if (here.is_done) {
    leave(std::move(right));
    if (here.error) {
      std::rethrow_exception(here.error);
    }
    return;
  }
  // A wait that lasts becomes one like any other: signal handlers, which it has to run, may call
  // this group, so it must not hold the right to drive.
  WorkPtr work;
  try {
    prepare();
    work = make_work();
    const std::lock_guard lock(mutex_);
    queue_.push_front(nullptr);
    queue_.front() = std::move(pending);
    pending_count_.fetch_add(1);
  } catch (...) {
    // It has begun, and ends here: the caller gets its buffers back.
    health_->fail(std::current_exception());
    running_here_ = &here;
    drive();
    running_here_ = nullptr;
    leave(std::move(right));
    std::rethrow_exception(here.error);
  }
  here.work = work;
  leave(std::move(right));
  wait_for(*work, kind);
}

void CollectiveQueue::wait_for(Work& work, OpKind kind) {
  work.wait_or_end([this, kind] {
    Blame blame = health_->blame(health_->rank(), "was interrupted");
    blame.operation = join(to_string(kind), " of group '", health_->name(), "'");
    health_->fail(ErrorKind::kAborted,
                  join(health_->who(health_->rank()), " was interrupted in ", blame.operation, " (",
                       kWhatInterrupts, ")."),
                  blame);
    drain();
  });
}

CollectiveQueue::Pending* CollectiveQueue::head() {
  if (running_here_ != nullptr) {
    return running_here_->is_done ? nullptr : running_here_;
  }
  const std::lock_guard lock(mutex_);
  return queue_.empty() ? nullptr : queue_.front().get();
}

bool CollectiveQueue::drive() {
  bool moved = false;
  while (Pending* pending = head()) {
    try {
      if (health_->has_failed()) {
        std::rethrow_exception(health_->failure());
      }
      if (!pending->execution) {
        start(*pending);
      }
      if (!step(*pending)) {
        return moved;
      }
      moved = true;
      if (pending->execution->is_done()) {
        finish(*pending, nullptr);
      }
    } catch (...) {
      if (!health_->has_failed()) {
        health_->fail(std::current_exception());
      }
      health_->release_buffers();
      fence(*pending);
      finish(*pending, health_->failure());
      moved = true;
    }
  }
  return moved;
}

Journal::Ticket CollectiveQueue::note_begin(const Operation& operation) {
  return health_->journal().begin(health_->fingerprint(), group_.sequence(),
                                  static_cast<std::uint8_t>(operation.kind),
                                  journaled_bytes(operation), operation.label);
}

void CollectiveQueue::start(Pending& pending) {
  if (!pending.ticket) {
    group_.begin();
    pending.ticket = note_begin(pending.operation);
  }
  pending.execution.emplace((pending.make_task != nullptr ? *pending.make_task : make_task_)(
      pending.operation, pending.is_posted));
}

bool CollectiveQueue::step(Pending& pending) {
  Execution& execution = *pending.execution;
  if (!execution.is_ready()) {
    waits_for_rank_.store(execution.condition().rank(), std::memory_order_relaxed);
    waits_in_sequence_.store(group_.sequence(), std::memory_order_relaxed);
    waits_in_kind_.store(pending.operation.kind, std::memory_order_relaxed);
    if (++looks_ % kLooksBetweenChecks != 0) {
      return false;
    }
    check_hope(pending);
    if (!execution.is_ready()) {
      return false;
    }
  }
  waits_for_rank_.store(-1, std::memory_order_relaxed);
  show_awaiting_nobody();
  execution.resume();
  return true;
}

void CollectiveQueue::check_hope(Pending& pending) {
  Execution& execution = *pending.execution;
  const int rank = execution.condition().rank();
  // Again and again: another group of this process may have taken it back.
  health_->show_awaited(rank);
  shows_awaited_ = true;
  WaitCheck check(*health_, rank, pending.deadline, pending.notice);
  if (!check.found_anything() || execution.is_ready()) {
    return;
  }
  check.end_or_warn(describe_head(pending.operation),
                    [this, &pending](const GroupHealth::Keeper& keeper) {
                      return health_->where(keeper.rank, pending.operation.kind, group_.sequence());
                    });
}

std::string CollectiveQueue::describe_head(const Operation& operation) const {
  const std::string label = operation.label.empty() ? "" : " (" + operation.label + ")";
  return join(to_string(operation.kind), " #", group_.sequence(), label, " of group '",
              health_->name(), "'");
}

void CollectiveQueue::fence(const Pending& pending) noexcept {
  const Buffers& outputs = pending.operation.outputs;
  const auto is_symmetric = [this](const Buffer& buffer) {
    return group_.heap().find(buffer.data, buffer.bytes()) != 0;
  };
  if (has_fenced_ || !pending.execution ||
      !std::any_of(outputs.begin(), outputs.end(), is_symmetric)) {
    return;
  }
  has_fenced_ = true;
  try {
    if (!health_->wait_for_heap_writers(kFencePatience)) {
      fence_heap_();
    }
  } catch (const std::exception& error) {
    log_line(LogLevel::kError,
             join("The symmetric memory of group '", health_->name(),
                  "' may still be written by a rank that does not leave its last operation: ",
                  error.what()));
  }
}

void CollectiveQueue::show_awaiting_nobody() noexcept {
  if (shows_awaited_) {
    health_->show_awaiting_nobody();
    shows_awaited_ = false;
  }
}

void CollectiveQueue::finish(Pending& pending, std::exception_ptr error) {
  show_awaiting_nobody();
  if (pending.ticket) {
    health_->journal().finish(*pending.ticket,
                              error ? JournalState::kFailed : JournalState::kSucceeded);
  }
  if (&pending == running_here_) {
    pending.error = std::move(error);
    pending.execution.reset();
    pending.is_done = true;
    return;
  }
  std::unique_ptr<Pending> owned;
  {
    const std::lock_guard lock(mutex_);
    owned = std::move(queue_.front());
    queue_.pop_front();
    pending_count_.fetch_sub(1);
  }
  // The state machine must be gone before the caller may reuse the buffers it refers to.
  owned->execution.reset();
  settle(*owned->work, std::move(error));
}

void CollectiveQueue::drain() {
  Right right = attend();
  drive();
  leave(std::move(right));
}

std::string CollectiveQueue::diagnosis() {
  const int rank = waits_for_rank_.load(std::memory_order_relaxed);
  if (rank < 0) {
    return {};
  }
  return health_->where(rank, waits_in_kind_.load(std::memory_order_relaxed),
                        waits_in_sequence_.load(std::memory_order_relaxed)) +
         ".";
}

}  // namespace pydist
