#include "base/engine_thread.h"

#include <pthread.h>

#include <csignal>
#include <utility>

namespace pydist {

EngineThread::EngineThread(const char* name, std::function<void()> run) {
  // A new thread inherits the mask.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread(std::move(run));
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  ::pthread_setname_np(thread_.native_handle(), name);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

EngineThread& EngineThread::operator=(EngineThread&& other) noexcept {
  join();
  thread_ = std::move(other.thread_);
  birth_ = other.birth_;
  return *this;
}

void EngineThread::join() noexcept {
  if (!has_started()) {
    return;
  }
  if (birth_.is_inherited() || is_this_thread()) {
    let_go();
  } else {
    thread_.join();
  }
}

void EngineThread::let_go() noexcept {
  if (has_started()) {
    thread_.detach();
  }
}

}  // namespace pydist
