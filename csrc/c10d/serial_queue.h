// Runs jobs one at a time, in the order in which they were posted, on a thread of its own, or at
// once on the caller's.
//
// Thread safe. The thread starts with the first posted job. stop() and the destructor wait for the
// jobs that were posted, except on the thread of a job, where it may let go of the queue, and while
// a job at its caller's is in other code (leave()): the remaining jobs then run after this one. In
// a forked child the queue takes nothing, is idle, and waits for nobody.

#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "base/engine_thread.h"
#include "base/fork.h"

namespace pydist {

class SerialQueue {
 public:
  // The name of the thread: 15 characters at most, and it lives as long as the process.
  explicit SerialQueue(const char* thread_name) : thread_name_(thread_name) {}
  SerialQueue(const SerialQueue&) = delete;
  SerialQueue& operator=(const SerialQueue&) = delete;
  ~SerialQueue();

  // `job` must not throw. Returns false, and takes nothing, once stopped. Throws, and takes
  // nothing, where no thread is to be had.
  [[nodiscard]] bool post(std::function<void()> job);

  // Runs `job` here if there is no other; what is posted meanwhile comes after it. Returns whether
  // it has. `job` must not throw.
  [[nodiscard]] bool run_if_idle(const std::function<void()>& job);

  [[nodiscard]] bool is_idle() const;
  // Whether this thread is in run_if_idle().
  [[nodiscard]] bool runs_here() const;
  // For a job in run_if_idle(): calls what may wait for a stop() of another thread.
  void leave(const std::function<void()>& call);

  // Returns whether all jobs have ended. Idempotent.
  bool stop();

 private:
  struct State {
    mutable std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> jobs;  // guarded by mutex
    std::thread::id worker;                  // of the job that runs; guarded by mutex
    bool stopped = false;                    // guarded by mutex
    bool serving = false;                    // whether there is a thread; guarded by mutex
    bool runs_at_caller = false;             // the job that runs; guarded by mutex
    bool is_left = false;                    // by that job; guarded by mutex

    [[nodiscard]] bool is_busy() const { return worker != std::thread::id(); }
    EngineThread thread;  // guarded by mutex, but for joining
  };

  static void serve(State& state);
  static void run(State& state, std::unique_lock<std::mutex>& lock,
                  const std::function<void()>& job);

  const char* const thread_name_;
  const Birth birth_;
  // Apart, so that a forked child can leave it as it is, and shared with the thread, which may be
  // the one that destroys the queue.
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace pydist
