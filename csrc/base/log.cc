#include "base/log.h"

#include <unistd.h>

#include <atomic>

namespace pydist {
namespace {

std::atomic<int> log_rank{-1};
std::atomic<LogLevel> least_level{LogLevel::kWarning};

}  // namespace

void set_log_rank(int rank) noexcept { log_rank.store(rank, std::memory_order_relaxed); }

void set_log_level(LogLevel level) noexcept { least_level.store(level, std::memory_order_relaxed); }

bool is_logged(LogLevel level) noexcept {
  return level <= least_level.load(std::memory_order_relaxed);
}

void log_line(LogLevel level, const std::string& text) noexcept {
  if (!is_logged(level)) {
    return;
  }
  try {
    std::string line = "pydist";
    if (const int rank = log_rank.load(std::memory_order_relaxed); rank >= 0) {
      line += "[rank " + std::to_string(rank) + "]";
    }
    line += ' ';
    line += to_string(level);
    line += ": " + text + "\n";
    // A lost log line is no reason to fail.
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
  } catch (...) {  // out of memory
  }
}

}  // namespace pydist
