#include "base/log.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>

namespace pydist {
namespace {

constexpr int kNoPlace = -1;
constexpr std::size_t kMostSubsystems = 32;

std::atomic<int> log_rank{-1};
std::atomic<LogLevel> level_of_all{LogLevel::kWarning};
// The most talkative level that anything has: most lines that are not printed end here.
std::atomic<LogLevel> highest_level{LogLevel::kWarning};
// By the places of log_subsystems(), one more than the level; 0 where a subsystem has none of its
// own.
std::array<std::atomic<int>, kMostSubsystems> own_levels{};

int place_of(std::string_view subsystem) noexcept {
  const auto all = log_subsystems();
  const auto found = std::find(all.begin(), all.end(), subsystem);
  return found == all.end() ? kNoPlace : static_cast<int>(found - all.begin());
}

const std::string& host() {
  static const std::string name = [] {
    std::array<char, 256> buffer{};
    return ::gethostname(buffer.data(), buffer.size() - 1) == 0 ? std::string(buffer.data())
                                                                : std::string("unknown");
  }();
  return name;
}

}  // namespace

void set_log_rank(int rank) noexcept { log_rank.store(rank, std::memory_order_relaxed); }

void set_log_levels(const LogLevels& levels) {
  std::array<int, kMostSubsystems> own{};
  LogLevel highest = levels.all;
  for (const auto& [subsystem, level] : levels.of_subsystems) {
    const int place = place_of(subsystem);
    if (place != kNoPlace) {
      own[static_cast<std::size_t>(place)] = static_cast<int>(level) + 1;
      highest = std::max(highest, level);
    }
  }
  for (std::size_t place = 0; place < kMostSubsystems; ++place) {
    own_levels[place].store(own[place], std::memory_order_relaxed);
  }
  level_of_all.store(levels.all, std::memory_order_relaxed);
  highest_level.store(highest, std::memory_order_relaxed);
}

std::string_view subsystem_of(std::string_view file) noexcept {
  const std::size_t end = file.rfind('/');
  if (end == std::string_view::npos || end == 0) {
    return {};
  }
  const std::size_t begin = file.rfind('/', end - 1);
  return file.substr(begin == std::string_view::npos ? 0 : begin + 1,
                     begin == std::string_view::npos ? end : end - begin - 1);
}

bool is_logged(LogLevel level, const char* file) noexcept {
  if (level > highest_level.load(std::memory_order_relaxed)) {
    return false;
  }
  const int place = place_of(subsystem_of(file));
  if (place != kNoPlace) {
    const int own = own_levels[static_cast<std::size_t>(place)].load(std::memory_order_relaxed);
    if (own != 0) {
      return static_cast<int>(level) < own;
    }
  }
  return level <= level_of_all.load(std::memory_order_relaxed);
}

void log_line(LogLevel level, const std::string& text, const char* file) noexcept {
  if (!is_logged(level, file)) {
    return;
  }
  try {
    std::string line = "pydist[";
    if (const int rank = log_rank.load(std::memory_order_relaxed); rank >= 0) {
      line += "rank " + std::to_string(rank) + " on ";
    }
    line += "host " + host() + "] ";
    line += to_string(level);
    line += ": ";
    if (const std::string_view subsystem = subsystem_of(file); !subsystem.empty()) {
      line += std::string(subsystem) + ": ";
    }
    line += text + "\n";
    // A lost log line is no reason to fail.
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
  } catch (...) {  // out of memory
  }
}

}  // namespace pydist
