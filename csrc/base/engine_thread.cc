#include "base/engine_thread.h"

#include <pthread.h>

#include <csignal>
#include <utility>

namespace pydist {

std::thread start_engine_thread(const char* name, std::function<void()> run) {
  // A new thread inherits the mask.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  try {
    thread = std::thread(std::move(run));
  } catch (...) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  ::pthread_setname_np(thread.native_handle(), name);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace pydist
