// Lines for the log from a thread that must never wait: standard error may be a pipe that nobody
// reads. Another thread writes them; what comes while that one is stuck is dropped, and counted.
//
// Thread safe.

#pragma once

#include <memory>
#include <string>

#include "base/engine_thread.h"
#include "base/env.h"
#include "base/fork.h"

namespace pydist {

class LogQueue {
 public:
  LogQueue();
  LogQueue(const LogQueue&) = delete;
  LogQueue& operator=(const LogQueue&) = delete;
  // Waits a moment for what is still to be written.
  ~LogQueue();

  // `file` is the caller's, as in log_line.
  void post(LogLevel level, std::string text, const char* file = __builtin_FILE()) noexcept;

 private:
  struct Lines;

  const Birth birth_;
  const std::shared_ptr<Lines> lines_;  // its thread may outlive the queue, where it is stuck
  EngineThread thread_;                 // guarded by the lock of *lines_
};

}  // namespace pydist
