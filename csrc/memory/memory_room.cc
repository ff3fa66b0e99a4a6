#include "memory/memory_room.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/error.h"
#include "topology/cgroup.h"

namespace pydist {
namespace {

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

// What a reservation must leave free, so that the step after it does not fail.
constexpr std::size_t kMarginBytes = std::size_t{32} << 20;

// The number behind the word `key`.
std::optional<std::size_t> number_after(const std::vector<std::string>& words,
                                        std::string_view key) {
  const auto found = std::find(words.begin(), words.end(), key);
  return found == words.end() || found + 1 == words.end() ? std::nullopt : whole_number(found[1]);
}

std::size_t machine_room() {
  std::ifstream file("/proc/meminfo");
  const std::vector<std::string> words(std::istream_iterator<std::string>(file), {});
  const auto kib = number_after(words, "MemAvailable:");
  return kib ? *kib * 1024 : kUnlimited;
}

// The room under one cgroup's limit, if it has one. Clean file pages count as used but can be
// dropped.
std::optional<std::size_t> room_in(const Cgroup& cgroup) {
  const auto limit = cgroup.number_in(cgroup.is_unified ? "memory.max" : "memory.limit_in_bytes");
  const auto used =
      cgroup.number_in(cgroup.is_unified ? "memory.current" : "memory.usage_in_bytes");
  if (!limit || !used) {
    return std::nullopt;
  }
  const std::size_t droppable =
      number_after(cgroup.words_in("memory.stat"),
                   cgroup.is_unified ? "inactive_file" : "total_inactive_file")
          .value_or(0);
  const std::size_t held = *used > droppable ? *used - droppable : 0;
  return *limit > held ? *limit - held : 0;
}

// One of the limits, and how many of those who take memory it binds.
struct Limit {
  MemoryRoom room;
  std::size_t takers;
};

std::string namespace_of_cgroups() {
  std::error_code ignored;
  return std::filesystem::read_symlink("/proc/self/ns/cgroup", ignored).string();
}

std::vector<Limit> limits(std::span<const std::string> takers, const std::string& mount,
                          const std::string& memberships) {
  std::vector<Limit> all{{{machine_room(), "the machine's free memory"}, takers.size()}};
  const std::string same_namespace = namespace_of_cgroups() + "\n";
  for (const Cgroup& cgroup : cgroups_limiting("memory", mount, memberships)) {
    if (const auto bytes = room_in(cgroup)) {
      const auto bound = std::count_if(takers.begin(), takers.end(), [&](const std::string& taker) {
        return taker.starts_with(same_namespace) &&
               taker.find("\n" + cgroup.folder + "\n") != std::string::npos;
      });
      all.push_back(
          {{*bytes, "the memory limit of cgroup " + cgroup.path}, static_cast<std::size_t>(bound)});
    }
  }
  return all;
}

}  // namespace

MemoryRoom memory_room(const std::string& mount, const std::string& memberships) {
  const std::vector<Limit> all = limits({}, mount, memberships);
  return std::min_element(
             all.begin(), all.end(),
             [](const Limit& a, const Limit& b) { return a.room.bytes < b.room.bytes; })
      ->room;
}

std::string memory_limits(const std::string& mount, const std::string& memberships) {
  std::string text = namespace_of_cgroups() + "\n";
  for (const Cgroup& cgroup : cgroups_limiting("memory", mount, memberships)) {
    text += cgroup.folder + "\n";
  }
  return text;
}

void check_memory_room(std::size_t bytes, const std::string& purpose,
                       std::span<const std::string> takers, const std::string& mount,
                       const std::string& memberships) {
  for (const Limit& limit : limits(takers, mount, memberships)) {
    const std::size_t count = std::max<std::size_t>(limit.takers, 1);
    const std::size_t room = limit.room.bytes;
    if (room >= kMarginBytes && bytes <= (room - kMarginBytes) / count) {
      continue;
    }
    const std::string all_take = count > 1 ? join(" on each of ", count, " ranks") : std::string();
    throw TransportError(join(
        "No room for ", bytes >> 10, " KiB of shared memory", all_take, " (", purpose,
        "): ", limit.room.limited_by, " leaves ", room >> 10, " KiB, of which ", kMarginBytes >> 10,
        " KiB stay free for everybody else. Free memory, raise the limit, or start fewer "
        "ranks on this host."));
  }
}

}  // namespace pydist
