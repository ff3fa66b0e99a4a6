#include "c10d/serial_queue.h"

#include <utility>

namespace pydist {

SerialQueue::~SerialQueue() {
  if (birth_.is_inherited()) {
    // In a forked child. The thread stayed in the parent, and the guarded state may be half
    // changed.
    (void)state_.release();
    return;
  }
  stop();
}

bool SerialQueue::post(std::function<void()> job) {
  const std::lock_guard lock(state_->mutex);
  if (state_->stopped) {
    return false;
  }
  state_->jobs.push_back(std::move(job));
  if (!state_->thread.has_started()) {
    state_->thread = EngineThread(thread_name_, [state = state_.get()] { serve(*state); });
  }
  state_->changed.notify_all();
  return true;
}

bool SerialQueue::is_idle() const {
  const std::lock_guard lock(state_->mutex);
  return !state_->busy && state_->jobs.empty();
}

void SerialQueue::stop() {
  EngineThread thread;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopped = true;
    state_->changed.notify_all();
    thread = std::move(state_->thread);
  }
  thread.join();
}

void SerialQueue::serve(State& state) {
  std::unique_lock lock(state.mutex);
  for (;;) {
    state.changed.wait(lock, [&] { return state.stopped || !state.jobs.empty(); });
    if (state.jobs.empty()) {
      return;
    }
    std::function<void()> job = std::move(state.jobs.front());
    state.jobs.pop_front();
    state.busy = true;
    lock.unlock();
    job();
    job = nullptr;
    lock.lock();
    state.busy = false;
  }
}

}  // namespace pydist
