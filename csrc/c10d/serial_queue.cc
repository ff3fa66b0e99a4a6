#include "c10d/serial_queue.h"

#include <utility>

namespace pydist {

SerialQueue::~SerialQueue() {
  if (birth_.is_inherited()) {
    // In a forked child. The thread stayed in the parent, and the guarded state may be half
    // changed: it is never destroyed.
    new std::shared_ptr<State>(std::move(state_));
    return;
  }
  stop();
}

bool SerialQueue::post(std::function<void()> job) {
  if (birth_.is_inherited()) {
    return false;
  }
  const std::lock_guard lock(state_->mutex);
  if (state_->stopped) {
    return false;
  }
  if (!state_->thread.has_started()) {
    state_->thread = EngineThread(thread_name_, [state = state_] { serve(*state); });
    state_->serving = true;
  }
  state_->jobs.push_back(std::move(job));
  state_->changed.notify_all();
  return true;
}

bool SerialQueue::is_idle() const {
  if (birth_.is_inherited()) {
    return true;
  }
  const std::lock_guard lock(state_->mutex);
  return !state_->busy && state_->jobs.empty();
}

void SerialQueue::stop() {
  if (birth_.is_inherited()) {
    return;  // the thread is the parent's
  }
  std::unique_lock lock(state_->mutex);
  state_->stopped = true;
  state_->changed.notify_all();
  EngineThread thread = std::move(state_->thread);
  if (state_->server == std::this_thread::get_id()) {
    lock.unlock();
    thread.let_go();
    return;
  }
  // A job that stopped the queue has let go of the thread: nobody can join it any more.
  state_->changed.wait(lock, [this] { return !state_->serving; });
  lock.unlock();
  thread.join();
}

void SerialQueue::serve(State& state) {
  std::unique_lock lock(state.mutex);
  state.server = std::this_thread::get_id();
  for (;;) {
    state.changed.wait(lock, [&] { return state.stopped || !state.jobs.empty(); });
    if (state.jobs.empty()) {
      state.serving = false;
      state.server = {};
      state.changed.notify_all();
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
