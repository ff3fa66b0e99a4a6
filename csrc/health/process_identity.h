// Which process of which host one is, so that others can tell whether it still runs.

#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

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

}  // namespace pydist
