#include "memory/memory_room.h"

#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

#include "base/error.h"

namespace pydist {
namespace {

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

// What a reservation must leave free, so that the step after it does not fail.
constexpr std::size_t kMarginBytes = std::size_t{32} << 20;

std::optional<std::size_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  if (!(file >> word)) {
    return std::nullopt;
  }
  if (word == "max") {
    return kUnlimited;
  }
  try {
    return std::stoull(word);
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

// The value of `key` in a file of "key value" or "key: value kB" lines.
std::optional<std::size_t> read_field(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    std::size_t value = 0;
    std::string unit;
    if (words >> name >> value && (name == key || name == key + ":")) {
      return words >> unit && unit == "kB" ? value * 1024 : value;
    }
  }
  return std::nullopt;
}

std::size_t machine_room() {
  return read_field("/proc/meminfo", "MemAvailable").value_or(kUnlimited);
}

// The room under one cgroup's limit. Clean file pages count as used but can be dropped.
std::optional<std::size_t> cgroup_room(const std::string& folder, bool unified) {
  const auto limit = read_number(folder + (unified ? "/memory.max" : "/memory.limit_in_bytes"));
  const auto used = read_number(folder + (unified ? "/memory.current" : "/memory.usage_in_bytes"));
  if (!limit || !used || *limit == kUnlimited) {
    return std::nullopt;
  }
  const std::size_t droppable =
      read_field(folder + "/memory.stat", unified ? "inactive_file" : "total_inactive_file")
          .value_or(0);
  const std::size_t held = *used > droppable ? *used - droppable : 0;
  return *limit > held ? *limit - held : 0;
}

// Where this process's memory cgroup is mounted: the folder of the hierarchy and the path in it.
struct CgroupPath {
  std::string mount;
  std::string path;
  bool unified;
};

std::optional<CgroupPath> find_cgroup() {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  std::optional<CgroupPath> found;
  while (std::getline(file, line)) {
    // hierarchy:controllers:path
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (("," + controllers + ",").find(",memory,") != std::string::npos) {
      return CgroupPath{"/sys/fs/cgroup/memory", path, /*unified=*/false};
    }
    if (controllers.empty()) {
      found = CgroupPath{"/sys/fs/cgroup", path, /*unified=*/true};
    }
  }
  return found;
}

}  // namespace

MemoryRoom memory_room() {
  MemoryRoom room{machine_room(), "the machine's free memory"};
  const auto cgroup = find_cgroup();
  if (!cgroup) {
    return room;
  }
  // Every ancestor's limit binds. Inside a container the path may name a folder that only the
  // host can see; the mount point itself is then the container's own cgroup.
  std::string path = cgroup->path;
  while (true) {
    const std::string folder = cgroup->mount + (path == "/" ? "" : path);
    if (const auto bytes = cgroup_room(folder, cgroup->unified); bytes && *bytes < room.bytes) {
      room = {*bytes, "the memory limit of cgroup " + (path.empty() ? "/" : path)};
    }
    if (path.empty() || path == "/") {
      return room;
    }
    path.erase(path.rfind('/'));
  }
}

void check_memory_room(std::size_t bytes, const std::string& purpose) {
  const MemoryRoom room = memory_room();
  if (room.bytes >= kMarginBytes && bytes <= room.bytes - kMarginBytes) {
    return;
  }
  throw TransportError(join("No room for ", bytes >> 10, " KiB of shared memory (", purpose,
                            "): ", room.limited_by, " leaves ", room.bytes >> 10, " KiB, of which ",
                            kMarginBytes >> 10,
                            " KiB stay free for everybody else. Free memory, raise the limit, or "
                            "start fewer ranks on this host."));
}

}  // namespace pydist
