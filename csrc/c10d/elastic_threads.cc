#include "c10d/elastic_threads.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/engine_thread.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"

namespace pydist {
namespace {

constexpr std::chrono::seconds kIdleLife{10};

}  // namespace

struct ElasticThreads::State {
  const Birth birth;
  std::mutex mutex;
  std::condition_variable posted;
  std::condition_variable finished;
  std::deque<std::function<void()>> jobs;  // guarded by mutex
  std::size_t idle = 0;                    // guarded by mutex
  std::size_t running = 0;                 // guarded by mutex
  bool closed = false;                     // guarded by mutex
};

ElasticThreads::ElasticThreads() : state_(std::make_shared<State>()) {}

void ElasticThreads::post(std::function<void()> job) {
  if (!try_post(job)) {
    throw TransportError(kNoThread);
  }
}

void ElasticThreads::post_or_run(std::function<void()> job) noexcept {
  if (try_post(job)) {
    return;
  }
  static std::atomic<bool> has_warned{false};
  if (!has_warned.exchange(true)) {
    log_line(LogLevel::kWarning, join(kNoThread, " What would run there holds up other work now."));
  }
  job();
}

bool ElasticThreads::try_post(std::function<void()>& job) {
  if (state_->birth.is_inherited()) {
    // The parent's threads do not exist here, and its mutex may be held for ever. The old state
    // is left as it is: destroying it could touch what another thread was amid changing.
    new std::shared_ptr<State>(std::exchange(state_, std::make_shared<State>()));
  }
  const std::shared_ptr<State> state = state_;
  {
    const std::lock_guard lock(state->mutex);
    if (state->closed) {
      new std::function<void()>(std::move(job));
      return true;
    }
    if (state->idle > state->jobs.size()) {
      state->jobs.push_back(std::move(job));
      state->posted.notify_one();
      return true;
    }
    // Started under the lock: the job is not there before its thread is.
    try {
      // No EngineThread: user code runs here, and a process that it starts inherits what signals
      // are blocked.
      std::thread([state] { serve(*state); }).detach();
    } catch (const std::exception&) {
      return false;
    }
    state->jobs.push_back(std::move(job));
  }
  return true;
}

void ElasticThreads::serve(State& state) {
  pthread_setname_np(pthread_self(), "pydist-wait");
  std::unique_lock lock(state.mutex);
  for (;;) {
    while (!state.jobs.empty()) {
      std::function<void()> next = std::move(state.jobs.front());
      state.jobs.pop_front();
      ++state.running;
      lock.unlock();
      next();
      next = nullptr;
      lock.lock();
      --state.running;
      state.finished.notify_all();
    }
    ++state.idle;
    const bool has_job =
        state.posted.wait_for(lock, kIdleLife, [&] { return !state.jobs.empty(); });
    --state.idle;
    if (!has_job) {
      return;
    }
  }
}

void ElasticThreads::close(std::chrono::milliseconds patience) {
  if (state_->birth.is_inherited()) {
    return;
  }
  std::unique_lock lock(state_->mutex);
  state_->closed = true;
  state_->finished.wait_for(lock, patience,
                            [this] { return state_->jobs.empty() && state_->running == 0; });
  // What has not begun by now must not begin, nor be destroyed: a job may hold the last reference
  // to something that waits for it.
  static auto& given_up = *new std::vector<std::deque<std::function<void()>>>;
  static std::mutex& guard = *new std::mutex;
  if (!state_->jobs.empty()) {
    const std::lock_guard guarded(guard);
    given_up.push_back(std::exchange(state_->jobs, {}));
  }
}

ElasticThreads& ElasticThreads::shared() {
  static auto* const threads = new ElasticThreads;
  return *threads;
}

}  // namespace pydist
