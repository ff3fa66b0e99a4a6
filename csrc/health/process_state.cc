#include "health/process_state.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <string_view>

#include "memory/file_descriptor.h"

namespace pydist {

namespace {

ProcessState state_of(char letter) noexcept {
  switch (letter) {
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

}  // namespace

ProcessStatus process_status(pid_t pid) noexcept {
  if (pid <= 0) {
    return {ProcessState::kUnknown, 0};
  }
  std::array<char, 64> path{};
  std::snprintf(path.data(), path.size(), "/proc/%d/stat", static_cast<int>(pid));
  const FileDescriptor file(::open(path.data(), O_RDONLY | O_CLOEXEC));
  // "71 (name) S ...": the name has 63 bytes at most, and may hold brackets. Fifty numbers follow.
  std::array<char, 1024> text{};
  const ssize_t got = file ? ::read(file.get(), text.data(), text.size()) : -1;
  if (got <= 0) {
    const bool is_gone = ::kill(pid, 0) != 0 && errno == ESRCH;
    return {is_gone ? ProcessState::kDead : ProcessState::kUnknown, 0};
  }
  std::string_view line(text.data(), static_cast<std::size_t>(got));
  const std::size_t name_end = line.rfind(") ");
  if (name_end == std::string_view::npos || name_end + 2 >= line.size()) {
    return {ProcessState::kUnknown, 0};
  }
  line.remove_prefix(name_end + 2);
  ProcessStatus status{state_of(line[0]), 0};
  // The start is the 19th field after the state.
  for (int field = 0; field < 19; ++field) {
    const std::size_t space = line.find(' ');
    line.remove_prefix(space == std::string_view::npos ? line.size() : space + 1);
  }
  std::from_chars(line.data(), line.data() + line.size(), status.started);
  return status;
}

ProcessState process_state(pid_t pid) noexcept { return process_status(pid).state; }

std::string_view in_words(ProcessState state) noexcept {
  switch (state) {
    case ProcessState::kStopped:
      return "is stopped (SIGSTOP or a debugger)";
    case ProcessState::kInKernel:
      return "is in an uninterruptible system call, or frozen (by its cgroup, as by docker pause)";
    case ProcessState::kDead:
      return "has died";
    case ProcessState::kUnknown:
    case ProcessState::kAlive:
      break;
  }
  return "";
}

}  // namespace pydist
