// How much memory this process may still take before the machine or its cgroup runs out.
//
// Shared memory is charged when it is reserved; a reservation beyond the cgroup's limit wakes the
// OOM killer instead of failing. So the engine looks first.

#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace pydist {

struct MemoryRoom {
  std::size_t bytes = 0;
  std::string limited_by;  // "the machine's free memory", "the memory limit of cgroup /x"
};

// `mount` is the folder of cgroups, `memberships` the file that names this process's.
[[nodiscard]] MemoryRoom memory_room(const std::string& mount = "/sys/fs/cgroup",
                                     const std::string& memberships = "/proc/self/cgroup");

// The cgroups that limit this process's memory, as one text, by which processes of one machine tell
// which limits they share.
[[nodiscard]] std::string memory_limits(const std::string& mount = "/sys/fs/cgroup",
                                        const std::string& memberships = "/proc/self/cgroup");

// Throws TransportError unless `bytes` more can be taken, with a margin for everybody else.
//
// `takers`: memory_limits() of all processes of the machine that take as much at the same time,
// this one included; none: this one alone. Each limit must leave room for all that it binds. The
// last two are as for memory_room().
void check_memory_room(std::size_t bytes, const std::string& purpose,
                       std::span<const std::string> takers = {},
                       const std::string& mount = "/sys/fs/cgroup",
                       const std::string& memberships = "/proc/self/cgroup");

}  // namespace pydist
