#include "communicator/native/message_queue.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "communicator/native/wait_check.h"

namespace pydist {
namespace {

// Looks at the lane before a receive gives up on being done at once: a few microseconds.
constexpr unsigned kLooksForMessage = 128;

}  // namespace

MessageQueue::MessageQueue(std::shared_ptr<ProgressThread> progress,
                           std::shared_ptr<GroupHealth> health, Messages messages)
    : WaitableDrivable(std::move(progress), HandOver::kSoon),
      health_(std::move(health)),
      messages_(std::move(messages)) {}

std::shared_ptr<NativeWork> MessageQueue::make_work() {
  return std::make_shared<NativeWork>(
      std::static_pointer_cast<WaitableDrivable>(shared_from_this()));
}

WorkPtr MessageQueue::submit(Operation operation, Deadline deadline) {
  std::shared_ptr<NativeWork> work = make_work();
  bool is_done = false;
  try {
    is_done = try_at_once(operation, /*may_wait=*/false);
  } catch (...) {
    // The group has failed: so does the operation, where its work is waited for.
  }
  if (is_done) {
    work->finish(nullptr, operation.kind == OpKind::kRecv ? operation.peer : -1);
    return work;
  }
  enqueue(std::move(operation), deadline, work);
  hand_over();
  return work;
}

WorkPtr MessageQueue::submit_awaited(Operation operation, Deadline deadline) {
  std::shared_ptr<NativeWork> work = make_work();
  enqueue(std::move(operation), deadline, work);
  return work;
}

void MessageQueue::enqueue(Operation operation, Deadline deadline,
                           std::shared_ptr<NativeWork> work) {
  prepare();
  const std::lock_guard lock(mutex_);
  submitted_.push_back({std::move(operation), deadline, std::move(work)});
  pending_count_.fetch_add(1);
}

// Note [Messages at once]: as Note [At once], for what rides in its announcement or is filled
// ahead. It takes no queue and wakes no thread of this process.
bool MessageQueue::try_at_once(const Operation& operation, bool may_wait) {
  Right right = try_attend();
  if (!right) {
    return false;
  }
  if (has_work() || health_->has_failed()) {
    right.unlock();
    return false;
  }
  bool is_done = false;
  std::optional<Journal::Ticket> ticket;
  try {
    // Where ranks share cores, a spinning one would keep the core from the one that it waits for.
    is_done = try_with_right(operation, ticket, may_wait && may_spin() ? kLooksForMessage : 1);
  } catch (...) {
    health_->fail(std::current_exception());
    health_->journal().finish(ticket ? *ticket : note_begin(operation, ++started_),
                              JournalState::kFailed);
    leave(std::move(right));
    std::rethrow_exception(health_->failure());
  }
  if (is_done) {
    health_->journal().finish(*ticket, JournalState::kSucceeded);
  }
  leave(std::move(right));
  return is_done;
}

bool MessageQueue::try_with_right(const Operation& operation,
                                  std::optional<Journal::Ticket>& ticket, unsigned looks) {
  if (operation.kind == OpKind::kSend) {
    const std::optional<MessagePlace> place =
        messages_.place_at_once(operation.peer, operation.inputs[0]);
    if (!place) {
      return false;
    }
    // First of all: a rank that is stopped once the peer can see its message has begun it.
    ticket = note_begin(operation, ++started_);
    messages_.send_at_once(operation.peer, operation.tag, operation.inputs[0], *place);
    return true;
  }
  if (operation.peer == kAnySource) {
    return false;
  }
  for (unsigned look = 1;; ++look) {
    switch (messages_.try_receive(operation.peer, operation.tag, operation.outputs[0], looks)) {
      case Messages::AtOnce::kDone:
        ticket = note_begin(operation, ++started_);
        return true;
      case Messages::AtOnce::kNever:
        return false;
      case Messages::AtOnce::kNotYet:
        if (look == looks) {
          return false;
        }
        spin_pause();
    }
  }
}

Journal::Ticket MessageQueue::note_begin(const Operation& operation, std::uint64_t number) {
  const Buffer& buffer =
      operation.kind == OpKind::kSend ? operation.inputs[0] : operation.outputs[0];
  return health_->journal().begin(health_->fingerprint(), number,
                                  static_cast<std::uint8_t>(operation.kind), buffer.bytes(),
                                  operation.label);
}

bool MessageQueue::drive() {
  if (!has_work()) {
    return false;
  }
  bool moved = false;
  try {
    if (health_->has_failed()) {
      std::rethrow_exception(health_->failure());
    }
    start_submitted();
    moved = messages_.advance();
    moved = !done_.empty() || moved;
    finish_done();
    if (!moved && ++looks_ % kLooksBetweenChecks == 0) {
      moved = check_hope();
    }
  } catch (...) {
    if (!health_->has_failed()) {
      health_->fail(std::current_exception());
    }
    health_->release_buffers();
    finish_done();
    fail_all(health_->failure());
    return true;
  }
  return moved;
}

void MessageQueue::start_submitted() {
  PendingList::iterator pending;
  {
    const std::lock_guard lock(mutex_);
    if (submitted_.empty()) {
      return;
    }
    pending = submitted_.begin();
    // All of them before any starts: where one throws, fail_all() has to find the rest.
    running_.splice(running_.end(), submitted_);
  }
  for (; pending != running_.end(); ++pending) {
    const Operation& operation = pending->operation;
    const bool is_send = operation.kind == OpKind::kSend;
    const Buffer& buffer = is_send ? operation.inputs[0] : operation.outputs[0];
    pending->number = ++started_;
    pending->ticket = note_begin(operation, pending->number);
    const auto on_done = [this, pending](int peer) { done_.push_back({pending, peer}); };
    if (is_send) {
      messages_.send(operation.peer, operation.tag, buffer, on_done);
    } else {
      messages_.receive(operation.peer == kAnySource ? std::nullopt : std::optional(operation.peer),
                        operation.tag, buffer, on_done);
    }
  }
}

void MessageQueue::finish_done() {
  if (!done_.empty()) {
    show_awaiting_nobody();
  }
  for (const Done& done : done_) {
    const Pending pending = std::move(*done.pending);
    running_.erase(done.pending);
    pending_count_.fetch_sub(1);
    health_->journal().finish(pending.ticket, JournalState::kSucceeded);
    settle(*pending.work, nullptr, done.peer);
  }
  done_.clear();
}

void MessageQueue::fail_all(const std::exception_ptr& error) {
  show_awaiting_nobody();
  PendingList all;
  {
    const std::lock_guard lock(mutex_);
    all.swap(submitted_);
  }
  all.splice(all.begin(), running_);
  for (const Pending& pending : all) {
    pending_count_.fetch_sub(1);
    if (pending.number != 0) {
      health_->journal().finish(pending.ticket, JournalState::kFailed);
    }
    settle(*pending.work, error);
  }
}

std::string MessageQueue::describe(const Pending& pending) const {
  const Operation& operation = pending.operation;
  const bool is_send = operation.kind == OpKind::kSend;
  const std::string peer =
      operation.peer == kAnySource ? "any rank" : join("rank ", operation.peer);
  return join(is_send ? "send to " : "receive from ", peer, " (tag ", operation.tag, ") in group '",
              health_->name(), "'");
}

void MessageQueue::show_awaited() {
  // A message that nobody waits for keeps nobody: this rank may be about to do what another one
  // waits for.
  const auto awaited = std::find_if(running_.begin(), running_.end(), [](const Pending& pending) {
    return pending.work->is_waited_for() && pending.operation.peer != kAnySource;
  });
  if (awaited == running_.end()) {
    show_awaiting_nobody();
    return;
  }
  // Again and again: another group of this process may have taken it back.
  health_->show_awaited(awaited->operation.peer);
  shows_awaited_ = true;
}

void MessageQueue::show_awaiting_nobody() noexcept {
  if (shows_awaited_) {
    health_->show_awaiting_nobody();
    shows_awaited_ = false;
  }
}

bool MessageQueue::check_hope() {
  show_awaited();
  for (Pending& pending : running_) {
    const int rank = pending.operation.peer;
    waits_for_rank_.store(rank, std::memory_order_relaxed);
    WaitCheck check(*health_, rank, pending.deadline, pending.notice);
    if (!check.found_anything()) {
      continue;
    }
    if (check.ends_the_wait() && messages_.advance()) {
      return true;  // this message or others may be done: the next turn settles them
    }
    check.end_or_warn(describe(pending), [this](const GroupHealth::Keeper& keeper) {
      return join(health_->who(keeper.rank), " ", keeper.cause);
    });
  }
  return false;
}

void MessageQueue::drain() {
  Right right = attend();
  drive();
  leave(std::move(right));
}

std::string MessageQueue::diagnosis() {
  const int rank = waits_for_rank_.load(std::memory_order_relaxed);
  return rank < 0 ? std::string() : health_->who(rank) + " " + health_->activity(rank) + ".";
}

}  // namespace pydist
