#include "topology/hosts.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <set>
#include <system_error>

#include "base/error.h"
#include "topology/cgroup.h"

namespace pydist {
namespace {

// The quota as a share of the period. Either may be "max" or -1, which means no limit.
std::optional<double> ratio(const std::string& quota, const std::string& period) {
  try {
    const double used = std::stod(quota);
    const double each = std::stod(period);
    if (used > 0 && each > 0) {
      return used / each;
    }
  } catch (const std::exception&) {  // absent, or "max"
  }
  return std::nullopt;
}

}  // namespace

std::string host_identity(const std::optional<std::string>& override_id) {
  if (override_id) {
    return "id:" + *override_id;
  }
  const std::string boot_id = machine_identity();
  if (boot_id.empty()) {
    return "name:" + host_name();
  }
  // Ranks meet over sockets that a network namespace has for itself: two of them, as two containers
  // have, are two hosts.
  std::error_code ignored;
  const std::string network = std::filesystem::read_symlink("/proc/self/ns/net", ignored).string();
  return join("boot:", boot_id, " ", network);
}

std::string machine_identity() {
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  return boot_id;
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) {
    return "unknown";
  }
  return name.data();
}

std::string name_of_process(std::int64_t pid, std::string_view host) {
  return join("pid ", pid, " on host ", host);
}

std::vector<int> allowed_processors() {
  std::vector<int> processors;
  // Machines with more processors than the fixed cpu_set_t holds refuse it: grow until it fits.
  for (int capacity = CPU_SETSIZE; capacity <= (1 << 20); capacity *= 2) {
    cpu_set_t* set = CPU_ALLOC(static_cast<std::size_t>(capacity));
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(capacity));
    CPU_ZERO_S(bytes, set);
    const bool known = ::sched_getaffinity(0, bytes, set) == 0;
    for (int cpu = 0; known && cpu < capacity; ++cpu) {
      if (CPU_ISSET_S(static_cast<std::size_t>(cpu), bytes, set)) {
        processors.push_back(cpu);
      }
    }
    CPU_FREE(set);
    if (known) {
      break;
    }
  }
  return processors;
}

std::optional<double> processor_quota(const std::string& mount, const std::string& memberships) {
  std::optional<double> least;
  for (const Cgroup& cgroup : cgroups_limiting("cpu", mount, memberships)) {
    std::vector<std::string> words =
        cgroup.words_in(cgroup.is_unified ? "cpu.max" : "cpu.cfs_quota_us");
    if (!cgroup.is_unified) {
      const std::vector<std::string> period = cgroup.words_in("cpu.cfs_period_us");
      words.insert(words.end(), period.begin(), period.end());
    }
    const auto cores = words.size() == 2 ? ratio(words[0], words[1]) : std::nullopt;
    if (cores && (!least || *cores < *least)) {
      least = cores;
    }
  }
  return least;
}

std::optional<std::size_t> tasks_left(const std::string& mount, const std::string& memberships) {
  std::optional<std::size_t> least;
  for (const Cgroup& cgroup : cgroups_limiting("pids", mount, memberships)) {
    const auto most = cgroup.number_in("pids.max");
    const auto current = cgroup.number_in("pids.current");
    if (most && current) {
      const std::size_t left = *most > *current ? *most - *current : 0;
      least = std::min(least.value_or(left), left);
    }
  }
  return least;
}

bool has_core_for_every_rank(const std::vector<ProcessorGrant>& ranks) {
  std::set<int> all;
  for (const ProcessorGrant& rank : ranks) {
    all.insert(rank.processors.begin(), rank.processors.end());
  }
  double cores = static_cast<double>(all.size());
  for (const ProcessorGrant& rank : ranks) {
    cores = std::min(cores, rank.quota.value_or(cores));
  }
  return cores >= static_cast<double>(ranks.size());
}

}  // namespace pydist
