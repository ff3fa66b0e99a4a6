// The handle of a submitted operation.
//
// Shared between the submitter and the backend that finishes it. All functions are thread safe.
// An operation finishes exactly once, with or without an error; its buffers must stay alive and
// untouched until then.

#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/deadline.h"

namespace pydist {

class Work {
 public:
  Work() = default;
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  virtual ~Work() = default;

  // Returns once the operation has finished; rethrows its error. Throws Timeout when `deadline`
  // passes first, InvalidUsage in a forked child if it had not finished before the fork, and what
  // base/interruption.h throws: the operation goes on, and may be waited for again.
  void wait(Deadline deadline = Deadline::never());

  // wait() for a caller that needs its buffers back whatever happens: an interruption calls `end`,
  // which has to end the operation, and is thrown once it has ended.
  void wait_or_end(const std::function<void()>& end);

  // wait() that returns when `deadline` has passed, and does not look at the operation's error.
  void wait_quietly(Deadline deadline);

  // Makes a device's stream (CUDA) wait for the operation, and returns without waiting itself.
  // False where only the caller can wait: then nothing has happened. Throws the operation's error
  // if it has failed by now; one that comes later fails the group.
  [[nodiscard]] virtual bool wait_on_stream(void* /*stream*/) { return false; }

  // Nobody is going to wait for the operation. A backend that leaves it to its waiters for a moment
  // moves it along from now on.
  virtual void go_on_unattended() {}

  // For which rank the operation waits, for the message of a Timeout; empty where nobody can tell.
  [[nodiscard]] virtual std::string diagnosis() { return {}; }

  // Whether the operation is captured: it runs whenever the CUDA graph that holds it is replayed.
  // Then only streams can wait for it, which makes them part of the capture. After the capture a
  // wait does nothing.
  [[nodiscard]] virtual bool is_captured() const { return false; }

  [[nodiscard]] bool is_completed() const noexcept {
    return state_.load(std::memory_order_acquire) != State::kPending;
  }

  // The operation's error; null while it runs and when it succeeded.
  [[nodiscard]] std::exception_ptr exception() const;

  // Receives only: the rank that the message came from, once completed.
  [[nodiscard]] int source_rank() const noexcept {
    return source_rank_.load(std::memory_order_relaxed);
  }

  // What an operation came to. Callbacks are handed it and must not look at the work instead: when
  // they run, the last reference to the work may be gone.
  struct Outcome {
    std::exception_ptr error;  // null for success
    int source_rank = -1;      // as source_rank()
  };
  using Callback = std::function<void(const Outcome&)>;

  // Calls `callback` once the operation has finished: at once if it has, otherwise on the thread
  // that finishes it, with no lock of the backend held. The callback must not throw.
  void on_completion(Callback callback);

  // For backends: finishes the operation and calls the callbacks. The first call wins.
  void finish(std::exception_ptr error = nullptr, int source_rank = -1);

  // The callbacks that a finished operation still owes. It does not refer to the work.
  class Notice {
   public:
    [[nodiscard]] bool is_empty() const noexcept { return callbacks_.empty(); }
    // A callback may submit operations, and wait for them.
    void deliver() const;

   private:
    friend class Work;
    Outcome outcome_;
    std::vector<Callback> callbacks_;
  };

  // finish() for a backend that holds locks: wakes the waiters, and returns what the backend has
  // to deliver once it holds none.
  [[nodiscard]] Notice settle(std::exception_ptr error, int source_rank = -1);

 protected:
  // Returns when completed or when the deadline has passed; calls check_interruption(). Backends
  // whose waiters move the operation along themselves override it.
  virtual void block(Deadline deadline);

 private:
  enum class State : unsigned char { kPending, kSucceeded, kFailed };

  std::atomic<State> state_{State::kPending};
  std::atomic<int> source_rank_{-1};
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  std::exception_ptr error_;         // guarded by mutex_
  std::vector<Callback> callbacks_;  // guarded by mutex_
};

using WorkPtr = std::shared_ptr<Work>;

// The handle of an operation that has succeeded already.
[[nodiscard]] WorkPtr completed_work();

// Succeeds when all parts have; fails with the first error otherwise. Neighbours may be the same.
[[nodiscard]] WorkPtr combine(std::vector<WorkPtr> parts);

}  // namespace pydist
