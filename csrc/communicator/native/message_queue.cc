#include "communicator/native/message_queue.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "communicator/native/wait_check.h"

namespace pydist {

MessageQueue::MessageQueue(std::shared_ptr<ProgressThread> progress,
                           std::shared_ptr<GroupHealth> health, Messages messages)
    : WaitableDrivable(std::move(progress)),
      health_(std::move(health)),
      messages_(std::move(messages)) {}

WorkPtr MessageQueue::submit(Operation operation, Deadline deadline) {
  WorkPtr work = submit_awaited(std::move(operation), deadline);
  hand_over();
  return work;
}

WorkPtr MessageQueue::submit_awaited(Operation operation, Deadline deadline) {
  auto work =
      std::make_shared<NativeWork>(std::static_pointer_cast<WaitableDrivable>(shared_from_this()));
  prepare();
  {
    const std::lock_guard lock(mutex_);
    submitted_.push_back({std::move(operation), deadline, work});
    pending_count_.fetch_add(1);
  }
  return work;
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
      check_hope();
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
    pending->ticket = health_->journal().begin(health_->fingerprint(), pending->number,
                                               static_cast<std::uint8_t>(operation.kind),
                                               buffer.bytes(), operation.label);
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

void MessageQueue::check_hope() {
  show_awaited();
  for (Pending& pending : running_) {
    const int rank = pending.operation.peer;
    waits_for_rank_.store(rank, std::memory_order_relaxed);
    WaitCheck check(*health_, rank, pending.deadline, pending.notice);
    // What the peer did is looked at in the next turn.
    if (!check.found_anything() || (check.ends_the_wait() && messages_.advance())) {
      continue;
    }
    check.end_or_warn(describe(pending), [this](const GroupHealth::Keeper& keeper) {
      return join(health_->who(keeper.rank), " ", keeper.cause);
    });
  }
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
