// Tells of the death of processes of this host, for groups whose transport does not, or not soon.
//
// Each process is watched through a pidfd: unlike a connection, no process that was forked from it
// holds that open. One thread for each watch. It needs no memory that is shared with the processes,
// so it can't tell a death from an orderly end: the owner has to.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/engine_thread.h"
#include "base/fork.h"
#include "memory/file_descriptor.h"
#include "topology/rendezvous.h"

namespace pydist {

// By which a process is told apart from all others of all hosts, also from later ones with its
// number. Plain bytes, to be sent to other processes.
struct ProcessIdentity {
  std::uint64_t machine = 0;  // digest of the host and of the namespace in which `pid` counts
  std::int64_t pid = 0;
  std::uint64_t started = 0;  // in ticks of the machine's clock
  std::array<char, 64> host{};

  // This process's. `host_id` is PYDIST_HOST_ID, by which a user tells hosts apart.
  [[nodiscard]] static ProcessIdentity own(const std::optional<std::string>& host_id);

  // "pid 71 on host b".
  [[nodiscard]] std::string description() const;
};

// Whether the process with this number that had started then has ended, as far as /proc tells.
// False where it does not: no descriptor is left, say.
[[nodiscard]] bool has_ended(std::int64_t pid, std::uint64_t started);

// Processes of this machine: the rank of each, its host's name, its number, and when it has
// started.
using KnownProcesses = std::vector<std::tuple<int, std::string, std::int64_t, std::uint64_t>>;

// For ranks that wait for such processes to make a group: throws PeerLost where one of them is
// found to have ended. They are looked at now and then. Null where there are none.
[[nodiscard]] CheckHope hope_that_live(KnownProcesses processes);

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
  FileDescriptor stop_fd_;
  EngineThread thread_;
};

}  // namespace pydist
