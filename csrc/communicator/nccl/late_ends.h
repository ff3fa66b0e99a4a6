// Threads that finish the end of something, while the caller that ended it has gone on.
//
// NCCL ends a communicator together with those of its neighbours on the host, and only after the
// CUDA graphs that hold its operations are gone. That may take as long as another rank goes on, and
// the caller that ends a group does not wait for it. The thread that does is kept in this list. It
// is joined when the job is left, or by a later start() once it is over, and never detached.
//
// Thread safe. Nothing is run, and nobody waited for, under the lock.

#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <string>

#include "base/deadline.h"
#include "base/engine_thread.h"

namespace pydist {

class LateEnds {
 public:
  // Never destroyed.
  [[nodiscard]] static LateEnds& of_process();

  LateEnds() = default;
  LateEnds(const LateEnds&) = delete;
  LateEnds& operator=(const LateEnds&) = delete;

  // Runs `end`, which does not throw, on a thread of that name (of at most 15 characters), and
  // lets go of it there. `complaint` is what the log says if it is not over by `until`. Throws
  // where no thread is to be had. Waits for no thread, not even for one that is over: what ends
  // with a thread may need what the caller keeps from it, such as CUDA's locks.
  void start(const char* name, std::function<void()> end, Deadline until, std::string complaint);

  // Waits for those that have begun: for each until its own deadline, and `deadline` at most. What
  // hangs is left to itself, and stays in the list.
  void join(Deadline deadline = Deadline::never()) noexcept;

 private:
  struct End {
    EngineThread thread;
    Deadline until = Deadline::never();
    std::string complaint;
    bool is_over = false;
  };

  // Takes those that are over out of the list; under the lock.
  [[nodiscard]] std::list<End> take_over();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<End> ends_;  // guarded by mutex_
};

}  // namespace pydist
