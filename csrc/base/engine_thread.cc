#include "base/engine_thread.h"

#include <pthread.h>

#include <csignal>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace pydist {
namespace {

// Of this thread, and of those that it starts meanwhile.
class AllSignalsBlocked {
 public:
  AllSignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  AllSignalsBlocked(const AllSignalsBlocked&) = delete;
  AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;
  ~AllSignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

}  // namespace

EngineThread::EngineThread(const char* name, std::function<void()> run) {
  const AllSignalsBlocked blocked;
  try {
    thread_ = std::thread(std::move(run));
  } catch (const std::system_error&) {
    throw TransportError(pydist::join("The thread ", name, " could not be started. ", kNoThread));
  }
  ::pthread_setname_np(thread_.native_handle(), name);
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
