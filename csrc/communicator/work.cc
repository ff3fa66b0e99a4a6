#include "communicator/work.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "base/interruption.h"

namespace pydist {

void Work::wait(Deadline deadline) {
  wait_quietly(deadline);
  if (!is_completed()) {
    const std::string who = diagnosis();
    throw Timeout(who.empty() ? "wait() timed out before the operation had finished."
                              : "wait() timed out before the operation had finished: " + who);
  }
  rethrow_if_any(exception());
}

void Work::wait_quietly(Deadline deadline) {
  if (!is_completed()) {
    require_not_forked();  // who would finish it is a thread of the parent's
    block(deadline);
  }
}

void Work::wait_or_end(const std::function<void()>& end) {
  std::exception_ptr interruption;
  if (!is_completed()) {
    require_not_forked();
  }
  while (!is_completed()) {
    try {
      block(Deadline::never());
    } catch (...) {
      if (interruption == nullptr) {
        interruption = std::current_exception();
        // The handler may have run for long.
        if (!is_completed()) {
          end();
        }
      }
    }
  }
  rethrow_if_any(interruption);
  wait();
}

std::exception_ptr Work::exception() const {
  if (state_.load(std::memory_order_acquire) != State::kFailed) {
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  return error_;
}

void Work::on_completion(Callback callback) {
  Outcome outcome;
  {
    const std::lock_guard lock(mutex_);
    if (!is_completed()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
    outcome = {error_, source_rank()};
  }
  callback(outcome);
}

void Work::Notice::deliver() const {
  for (const Callback& callback : callbacks_) {
    callback(outcome_);
  }
}

void Work::finish(std::exception_ptr error, int source_rank) {
  settle(std::move(error), source_rank).deliver();
}

Work::Notice Work::settle(std::exception_ptr error, int source_rank) {
  Notice notice;
  const std::lock_guard lock(mutex_);
  if (is_completed()) {
    return notice;
  }
  notice.outcome_ = {error, source_rank};
  notice.callbacks_.swap(callbacks_);
  source_rank_.store(source_rank, std::memory_order_relaxed);
  error_ = std::move(error);
  state_.store(error_ ? State::kFailed : State::kSucceeded, std::memory_order_release);
  finished_.notify_all();
  return notice;
}

void Work::block(Deadline deadline) {
  std::unique_lock lock(mutex_);
  const auto completed = [this] { return is_completed(); };
  while (!finished_.wait_until(
             lock, deadline.earlier_of(Deadline::in(kInterruptionInterval)).when(), completed) &&
         !deadline.has_passed()) {
    lock.unlock();
    check_interruption();
    lock.lock();
  }
}

WorkPtr completed_work() {
  auto work = std::make_shared<Work>();
  work->finish();
  return work;
}

namespace {

class CombinedWork : public Work {
 public:
  explicit CombinedWork(std::vector<WorkPtr> parts) : parts_(std::move(parts)) {}

  // Not in the constructor: the callbacks need a reference to the work.
  static WorkPtr start(std::vector<WorkPtr> parts) {
    auto work = std::make_shared<CombinedWork>(std::move(parts));
    work->pending_.store(work->parts_.size(), std::memory_order_relaxed);
    for (const WorkPtr& part : work->parts_) {
      part->on_completion([work](const Outcome&) { work->part_finished(); });
    }
    return work;
  }

  [[nodiscard]] bool wait_on_stream(void* stream) override {
    return std::all_of(parts_.begin(), parts_.end(),
                       [stream](const WorkPtr& part) { return part->wait_on_stream(stream); });
  }

  [[nodiscard]] bool is_captured() const override {
    return std::any_of(parts_.begin(), parts_.end(),
                       [](const WorkPtr& part) { return part->is_captured(); });
  }

  [[nodiscard]] std::string diagnosis() override {
    const auto late = std::find_if(parts_.begin(), parts_.end(),
                                   [](const WorkPtr& part) { return !part->is_completed(); });
    return late == parts_.end() ? "" : (*late)->diagnosis();
  }

 protected:
  void block(Deadline deadline) override {
    for (const WorkPtr& part : parts_) {
      part->wait_quietly(deadline);
    }
    // The last part's waiter may be here before its callback has run.
    Work::block(deadline);
  }

 private:
  void part_finished() {
    if (pending_.fetch_sub(1, std::memory_order_acq_rel) != 1) {
      return;
    }
    for (const WorkPtr& part : parts_) {
      if (std::exception_ptr error = part->exception()) {
        finish(std::move(error));
        return;
      }
    }
    finish();
  }

  std::vector<WorkPtr> parts_;
  std::atomic<std::size_t> pending_{0};
};

}  // namespace

WorkPtr combine(std::vector<WorkPtr> parts) {
  parts.erase(std::unique(parts.begin(), parts.end()), parts.end());
  if (parts.empty()) {
    return completed_work();
  }
  if (parts.size() == 1) {
    return std::move(parts.front());
  }
  return CombinedWork::start(std::move(parts));
}

}  // namespace pydist
