#include "topology/hosts.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <set>

#include "base/error.h"

namespace pydist {
namespace {

std::string first_word(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  file >> word;
  return word;
}

// "quota period", either of which may be "max" or -1 for no limit.
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
  const std::string boot_id = first_word("/proc/sys/kernel/random/boot_id");
  return boot_id.empty() ? "name:" + host_name() : "boot:" + boot_id;
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) {
    return "unknown";
  }
  return name.data();
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
  const auto take = [&least](std::optional<double> cores) {
    if (cores && (!least || *cores < *least)) {
      least = cores;
    }
  };
  std::ifstream lines(memberships);
  // "0::/path" for version 2, "4:cpu,cpuacct:/path" for version 1.
  for (std::string line; std::getline(lines, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (second == std::string::npos) {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && join(",", controllers, ",").find(",cpu,") == std::string::npos) {
      continue;
    }
    const std::string top = controllers.empty() ? mount : join(mount, "/", controllers);
    std::string path = line.substr(second + 1);
    // A limit binds everything below it.
    for (;;) {
      path.erase(path.find_last_not_of('/') + 1);
      const std::string folder = top + path;
      std::ifstream unified(folder + "/cpu.max");
      std::string quota;
      std::string period;
      if (unified >> quota >> period) {
        take(ratio(quota, period));
      }
      take(ratio(first_word(folder + "/cpu.cfs_quota_us"),
                 first_word(folder + "/cpu.cfs_period_us")));
      if (path.empty()) {
        break;
      }
      path.erase(path.rfind('/'));
    }
  }
  return least;
}

bool has_core_for_every_rank(const std::vector<std::vector<int>>& allowed_by_rank,
                             std::optional<double> quota) {
  std::set<int> all;
  for (const auto& allowed : allowed_by_rank) {
    all.insert(allowed.begin(), allowed.end());
  }
  double cores = static_cast<double>(all.size());
  if (quota) {
    cores = std::min(cores, *quota);
  }
  return cores >= static_cast<double>(allowed_by_rank.size());
}

}  // namespace pydist
