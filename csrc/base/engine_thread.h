// A thread of the engine's own: it has a name, and no signal is handled on it. Signals are the
// user's, so a handler must run on one of the user's threads. Whoever started it joins it, or,
// where that may hang, lets it go.
//
// The engine has three kinds of threads: a loop or a task that belongs to one object is an
// EngineThread (the monitor, the progress thread, NCCL's watchdog; LateEnds keeps those that finish
// the end of something); jobs that go one after another run on a SerialQueue, which has one; jobs
// that wait for the program run on ElasticThreads, which nobody joins.
//
// For one thread at a time.

#pragma once

#include <functional>
#include <thread>

#include "base/fork.h"

namespace pydist {

// What a rank says that gets no thread.
inline constexpr const char* kNoThread =
    "The system gives this process no more threads (`ulimit -u`, or pids.max of its cgroup) or no "
    "memory for another (`ulimit -v`): raise the limit, or start fewer threads and processes.";

class EngineThread {
 public:
  // None yet.
  EngineThread() = default;
  // `name` has at most 15 characters. Throws TransportError where no thread is to be had.
  EngineThread(const char* name, std::function<void()> run);
  EngineThread(EngineThread&& other) noexcept = default;
  EngineThread& operator=(EngineThread&& other) noexcept;
  ~EngineThread() { join(); }

  [[nodiscard]] bool has_started() const noexcept { return thread_.joinable(); }
  [[nodiscard]] bool is_this_thread() const noexcept {
    return thread_.get_id() == std::this_thread::get_id();
  }

  // Waits until the thread ends, unless it is the calling one, which is on its way out, or does not
  // exist in this process, which was forked. Idempotent.
  void join() noexcept;

  // Nobody will join the thread: it ends by itself, or hangs where only the process can end it.
  void let_go() noexcept;

 private:
  std::thread thread_;
  Birth birth_;
};

}  // namespace pydist
