// Threads for optimizer steps that run beside the training, on the host.
//
// torch's own threads are as many as the program has set for its operators, often one where a GPU
// computes, and belong to the thread that calls. These are of their own number, and whoever calls
// run() is one of them meanwhile.
//
// One run() at a time: others wait for their turn. In a forked child, which has none of the
// threads, the caller does all.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "base/engine_thread.h"
#include "base/fork.h"

namespace pydist {

class StepThreads {
 public:
  using Range = std::function<void(std::int64_t first, std::int64_t last)>;

  // `count` includes the caller of run(). Throws InvalidUsage where it is less than 1,
  // TransportError where the system has no thread left.
  explicit StepThreads(int count);
  StepThreads(const StepThreads&) = delete;
  StepThreads& operator=(const StepThreads&) = delete;
  ~StepThreads();

  [[nodiscard]] int count() const noexcept { return count_; }

  // Calls range(first, last) for ranges that together are [0, count), and returns once all have
  // returned. No range but the last is shorter than `grain`. `range` must not throw. Needs no GIL.
  void run(std::int64_t count, std::int64_t grain, const Range& range);

 private:
  struct Job {
    const Range* range = nullptr;
    std::int64_t count = 0;
    std::int64_t step = 0;   // length of a range
    std::int64_t next = 0;   // where the next one begins
    std::int64_t ended = 0;  // how much has been done
  };

  void serve();
  // Takes ranges of the job until none is left. Called, and returns, with the lock.
  void take_part(std::unique_lock<std::mutex>& lock);

  const int count_;
  const Birth birth_;
  std::mutex turn_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Job job_;               // guarded by mutex_
  bool is_over_ = false;  // guarded by mutex_
  std::vector<EngineThread> threads_;
};

}  // namespace pydist
