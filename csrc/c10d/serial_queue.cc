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

bool SerialQueue::run_if_idle(const std::function<void()>& job) {
  if (birth_.is_inherited()) {
    return false;
  }
  // The job may be the last to know the queue.
  const std::shared_ptr<State> state = state_;
  std::unique_lock lock(state->mutex);
  if (state->stopped || state->is_busy() || !state->jobs.empty()) {
    return false;
  }
  state->runs_at_caller = true;
  run(*state, lock, job);
  state->runs_at_caller = false;
  if (state->stopped || !state->jobs.empty()) {
    state->changed.notify_all();
  }
  return true;
}

bool SerialQueue::is_idle() const {
  if (birth_.is_inherited()) {
    return true;
  }
  const std::lock_guard lock(state_->mutex);
  return !state_->is_busy() && state_->jobs.empty();
}

bool SerialQueue::runs_here() const {
  if (birth_.is_inherited()) {
    return false;
  }
  const std::lock_guard lock(state_->mutex);
  return state_->runs_at_caller && state_->worker == std::this_thread::get_id();
}

void SerialQueue::leave(const std::function<void()>& call) {
  const auto set_left = [state = state_](bool is_left) {
    const std::lock_guard lock(state->mutex);
    state->is_left = is_left;
    state->changed.notify_all();
  };
  set_left(true);
  try {
    call();
  } catch (...) {
    set_left(false);
    throw;
  }
  set_left(false);
}

bool SerialQueue::stop() {
  if (birth_.is_inherited()) {
    return true;  // the thread is the parent's
  }
  std::unique_lock lock(state_->mutex);
  state_->stopped = true;
  state_->changed.notify_all();
  EngineThread thread = std::move(state_->thread);
  if (state_->worker != std::this_thread::get_id()) {
    // A job that stopped the queue has let go of the thread: nobody can join it any more.
    state_->changed.wait(
        lock, [this] { return state_->is_left || (!state_->serving && !state_->is_busy()); });
  }
  if (state_->is_busy()) {
    lock.unlock();
    thread.let_go();
    return false;
  }
  lock.unlock();
  thread.join();
  return true;
}

void SerialQueue::run(State& state, std::unique_lock<std::mutex>& lock,
                      const std::function<void()>& job) {
  state.worker = std::this_thread::get_id();
  lock.unlock();
  job();
  lock.lock();
  state.worker = {};
}

void SerialQueue::serve(State& state) {
  std::unique_lock lock(state.mutex);
  for (;;) {
    state.changed.wait(lock, [&] { return state.jobs.empty() ? state.stopped : !state.is_busy(); });
    if (state.jobs.empty()) {
      state.serving = false;
      state.changed.notify_all();
      return;
    }
    std::function<void()> job = std::move(state.jobs.front());
    state.jobs.pop_front();
    // What the job holds goes with it, on this thread.
    run(state, lock, [&job] { std::exchange(job, nullptr)(); });
  }
}

}  // namespace pydist
