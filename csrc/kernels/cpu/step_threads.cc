#include "kernels/cpu/step_threads.h"

#include <algorithm>

#include "base/error.h"

namespace pydist {
namespace {

// Ranges for each thread, so that one which begins late leaves little to wait for.
constexpr std::int64_t kRangesPerThread = 4;

int checked(int count) {
  if (count < 1) {
    throw InvalidUsage(join("StepThreads: ", count, " threads; it takes 1 or more."));
  }
  return count;
}

}  // namespace

StepThreads::StepThreads(int count) : count_(checked(count)) {
  try {
    for (int i = 1; i < count_; ++i) {
      threads_.emplace_back("pydist-step", [this] { serve(); });
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
    changed_.notify_all();
    throw;  // the threads are joined with the member
  }
}

StepThreads::~StepThreads() {
  if (!birth_.is_inherited()) {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
    changed_.notify_all();
  }
  threads_.clear();
}

void StepThreads::run(std::int64_t count, std::int64_t grain, const Range& range) {
  if (count <= grain || threads_.empty() || birth_.is_inherited()) {
    range(0, count);
    return;
  }
  const std::lock_guard turn(turn_);
  std::unique_lock lock(mutex_);
  const std::int64_t ranges = count_ * kRangesPerThread;
  job_ = {&range, count, std::max(grain, (count + ranges - 1) / ranges), 0, 0};
  changed_.notify_all();
  take_part(lock);
  changed_.wait(lock, [this] { return job_.ended == job_.count; });
  job_ = {};
}

void StepThreads::serve() {
  std::unique_lock lock(mutex_);
  while (!is_over_) {
    if (job_.next < job_.count) {
      take_part(lock);
    } else {
      changed_.wait(lock);
    }
  }
}

void StepThreads::take_part(std::unique_lock<std::mutex>& lock) {
  while (job_.next < job_.count) {
    const std::int64_t first = job_.next;
    const std::int64_t last = std::min(job_.count, first + job_.step);
    const Range& range = *job_.range;
    job_.next = last;
    lock.unlock();
    range(first, last);
    lock.lock();
    job_.ended += last - first;
  }
  if (job_.ended == job_.count) {
    changed_.notify_all();
  }
}

}  // namespace pydist
