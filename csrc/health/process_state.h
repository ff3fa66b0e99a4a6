// What the system says of a process on this host, from outside.

#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string_view>

namespace pydist {

enum class ProcessState : unsigned char {
  kUnknown,   // it lives, or nobody can tell: another PID namespace, a hidden /proc
  kAlive,     // it runs, or sleeps
  kStopped,   // by a signal or a debugger
  kInKernel,  // in a system call that no signal ends
  kDead,      // gone, or waits only for its parent
};

// Of the process with this number here; kUnknown for 0. The caller knows that the number still
// belongs to the process that it means.
[[nodiscard]] ProcessState process_state(pid_t pid) noexcept;

struct ProcessStatus {
  ProcessState state;
  std::uint64_t started;  // in ticks of the machine's clock; 0 where nobody can tell
};
// The same with its start, by which a process is told from later ones with its number.
[[nodiscard]] ProcessStatus process_status(pid_t pid) noexcept;

// "is stopped (SIGSTOP or a debugger)"; empty where there is nothing to tell.
[[nodiscard]] std::string_view in_words(ProcessState state) noexcept;

}  // namespace pydist
