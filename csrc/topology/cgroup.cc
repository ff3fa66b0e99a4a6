#include "topology/cgroup.h"

#include <charconv>
#include <fstream>
#include <iterator>
#include <system_error>

#include "base/error.h"

namespace pydist {

std::optional<std::size_t> whole_number(std::string_view word) {
  std::size_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  return error == std::errc() && end == word.data() + word.size() ? std::optional(value)
                                                                  : std::nullopt;
}

std::vector<std::string> Cgroup::words_in(std::string_view file) const {
  std::ifstream words(join(folder, "/", file));
  return {std::istream_iterator<std::string>(words), {}};
}

std::optional<std::size_t> Cgroup::number_in(std::string_view file) const {
  const std::vector<std::string> words = words_in(file);
  return words.empty() ? std::nullopt : whole_number(words.front());
}

std::vector<Cgroup> cgroups_limiting(std::string_view controller, const std::string& mount,
                                     const std::string& memberships) {
  std::vector<Cgroup> found;
  std::ifstream lines(memberships);
  // "hierarchy:controllers:path": "0::/path" for version 2, "4:cpu,cpuacct:/path" for version 1.
  for (std::string line; std::getline(lines, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (second == std::string::npos) {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_unified = controllers.empty();
    if (!is_unified &&
        join(",", controllers, ",").find(join(",", controller, ",")) == std::string::npos) {
      continue;
    }
    const std::string top = is_unified ? mount : join(mount, "/", controllers);
    std::string path = line.substr(second + 1);
    for (;;) {
      path.erase(path.find_last_not_of('/') + 1);
      found.push_back({path.empty() ? "/" : path, top + path, is_unified});
      if (path.empty()) {
        break;
      }
      path.erase(path.rfind('/'));
    }
  }
  return found;
}

bool is_frozen(pid_t pid, const std::string& mount, const std::string& processes) {
  for (const Cgroup& cgroup :
       cgroups_limiting("freezer", mount, join(processes, "/", pid, "/cgroup"))) {
    const std::vector<std::string> words =
        cgroup.words_in(cgroup.is_unified ? "cgroup.events" : "freezer.state");
    for (std::size_t i = 0; i < words.size(); ++i) {
      if (words[i] == "FROZEN" ||
          (words[i] == "frozen" && i + 1 < words.size() && words[i + 1] == "1")) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace pydist
