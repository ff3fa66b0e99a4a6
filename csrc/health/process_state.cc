#include "health/process_state.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <string_view>

#include "memory/file_descriptor.h"

namespace pydist {

ProcessState process_state(pid_t pid) noexcept {
  if (pid <= 0) {
    return ProcessState::kUnknown;
  }
  std::array<char, 64> path{};
  std::snprintf(path.data(), path.size(), "/proc/%d/stat", static_cast<int>(pid));
  const FileDescriptor file(::open(path.data(), O_RDONLY | O_CLOEXEC));
  // "71 (name) S ...": the name has 63 bytes at most, and may hold brackets.
  std::array<char, 256> text{};
  const ssize_t got = file ? ::read(file.get(), text.data(), text.size()) : -1;
  if (got <= 0) {
    return ::kill(pid, 0) != 0 && errno == ESRCH ? ProcessState::kDead : ProcessState::kUnknown;
  }
  const std::string_view line(text.data(), static_cast<std::size_t>(got));
  const std::size_t name_end = line.rfind(") ");
  if (name_end == std::string_view::npos || name_end + 2 >= line.size()) {
    return ProcessState::kUnknown;
  }
  switch (line[name_end + 2]) {
    case 'T':
    case 't':
      return ProcessState::kStopped;
    case 'D':
      return ProcessState::kInKernel;
    case 'Z':
    case 'X':
      return ProcessState::kDead;
    default:
      return ProcessState::kAlive;
  }
}

std::string_view in_words(ProcessState state) noexcept {
  switch (state) {
    case ProcessState::kStopped:
      return "is stopped (SIGSTOP or a debugger)";
    case ProcessState::kInKernel:
      return "is in an uninterruptible system call";
    case ProcessState::kDead:
      return "has died";
    case ProcessState::kUnknown:
    case ProcessState::kAlive:
      break;
  }
  return "";
}

}  // namespace pydist
