// The control groups (cgroups) that this process is in, in version 1 and in version 2.
//
// What they limit belongs to whoever asks: memory to memory/memory_room, processors, processes and
// threads to topology/hosts. Thread safe.

#pragma once

#include <sys/types.h>

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pydist {

// Nothing where `word` is no number.
[[nodiscard]] std::optional<std::size_t> whole_number(std::string_view word);

struct Cgroup {
  std::string path;    // "/" is the topmost that this process sees
  std::string folder;  // where its files are
  bool is_unified;     // version 2, whose files have other names

  // The whitespace-separated words of a file; none where it cannot be read.
  [[nodiscard]] std::vector<std::string> words_in(std::string_view file) const;
  // The first of them as a number; nothing where it is none, as "max" is.
  [[nodiscard]] std::optional<std::size_t> number_in(std::string_view file) const;
};

// The cgroups that limit this process by `controller` ("cpu", "memory"): its own and all above it,
// since a limit binds everything below it. Inside a container the paths may name folders that only
// the host can see; the topmost is then the container's own.
//
// `mount` is the folder of cgroups, `memberships` the file that names this process's.
[[nodiscard]] std::vector<Cgroup> cgroups_limiting(
    std::string_view controller, const std::string& mount = "/sys/fs/cgroup",
    const std::string& memberships = "/proc/self/cgroup");

// Whether a process of this host is stopped by the freezer of its cgroup, as by `docker pause`.
// False where nobody can tell.
[[nodiscard]] bool is_frozen(pid_t pid, const std::string& mount = "/sys/fs/cgroup",
                             const std::string& processes = "/proc");

}  // namespace pydist
