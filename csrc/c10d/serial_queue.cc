#include "c10d/serial_queue.h"

#include <pthread.h>
#include <unistd.h>

#include <utility>

namespace pydist {

pid_t SerialQueue::current_process() { return getpid(); }

SerialQueue::~SerialQueue() {
  if (process_ != getpid()) {
    // The thread stayed in the parent, and what is guarded may be half changed.
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
  if (!state_->thread.joinable()) {
    state_->thread =
        std::thread([state = state_.get(), name = thread_name_] { serve(*state, name); });
  }
  state_->changed.notify_all();
  return true;
}

bool SerialQueue::is_idle() const {
  const std::lock_guard lock(state_->mutex);
  return !state_->busy && state_->jobs.empty();
}

void SerialQueue::stop() {
  std::thread thread;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopped = true;
    state_->changed.notify_all();
    thread = std::exchange(state_->thread, std::thread());
  }
  if (!thread.joinable()) {
    return;
  }
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();
  } else {
    thread.join();
  }
}

void SerialQueue::serve(State& state, const char* thread_name) {
  pthread_setname_np(pthread_self(), thread_name);
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
