// Tells of the deaths of ranks of gloo groups that run on this host: gloo itself does not, or not
// soon.
//
// Each process is watched through a pidfd: unlike a connection, no process that was forked from it
// holds that open. One thread for each watch. It needs no memory that is shared with the processes,
// so it can't tell a death from an orderly end: the owner has to. (On the native backend, whose
// ranks share memory, health/peer_death_monitor.h watches them.)

#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "base/engine_thread.h"
#include "base/fork.h"
#include "health/process_identity.h"
#include "memory/event_descriptor.h"
#include "memory/file_descriptor.h"

namespace pydist {

class DeathWatch {
 public:
  // Those of `processes` are watched that run on the machine of `self` and are not `self`.
  // `on_end` is called with the index of each that ends, or has ended, once and on the watch's
  // thread; it must not destroy the watch. Throws TransportError where the system gives no
  // descriptor or no thread.
  DeathWatch(const std::vector<ProcessIdentity>& processes, const ProcessIdentity& self,
             std::function<void(std::size_t)> on_end);
  DeathWatch(const DeathWatch&) = delete;
  DeathWatch& operator=(const DeathWatch&) = delete;
  // Waits for a call of `on_end` that is under way.
  ~DeathWatch();

 private:
  struct Watched {
    std::size_t index = 0;
    FileDescriptor pidfd;  // none: it had ended before
  };

  void run();

  const Birth birth_;
  const std::function<void(std::size_t)> on_end_;
  std::vector<Watched> watched_;
  EventDescriptor stop_fd_;
  EngineThread thread_;
};

}  // namespace pydist
