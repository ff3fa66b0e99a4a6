// Who is where: what a process tells its peers about the host it runs on.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace pydist {

// The same for two processes only if they may share memory; a handshake then proves that they can.
// PYDIST_HOST_ID, where set, otherwise the kernel's boot id and the network namespace.
[[nodiscard]] std::string host_identity(const std::optional<std::string>& override_id);

// The machine that this process runs on, containers of it included, as its kernel tells; empty
// where that does not.
[[nodiscard]] std::string machine_identity();

// For messages.
[[nodiscard]] std::string host_name();
// The same of a process: "pid 71 on host b".
[[nodiscard]] std::string name_of_process(std::int64_t pid, std::string_view host);

// The processors that this process may run on, by number.
[[nodiscard]] std::vector<int> allowed_processors();

// Processors' worth of time that this process's cgroup and the cgroups above it grant; nothing
// where none sets a limit. Knows both versions of cgroups. `mount` is the folder of cgroups,
// `memberships` the file that names this process's.
[[nodiscard]] std::optional<double> processor_quota(
    const std::string& mount = "/sys/fs/cgroup",
    const std::string& memberships = "/proc/self/cgroup");

// How many processes and threads more the cgroups of this process grant; nothing where none sets a
// limit. The arguments are those of processor_quota().
[[nodiscard]] std::optional<std::size_t> tasks_left(
    const std::string& mount = "/sys/fs/cgroup",
    const std::string& memberships = "/proc/self/cgroup");

// What a rank may use of its host, as allowed_processors() and processor_quota() say.
struct ProcessorGrant {
  std::vector<int> processors;
  std::optional<double> quota;
};

// Whether every rank of the host can have a core of its own: the union of what the ranks may run
// on, capped by the least of their quotas, covers them.
[[nodiscard]] bool has_core_for_every_rank(const std::vector<ProcessorGrant>& ranks);

}  // namespace pydist
