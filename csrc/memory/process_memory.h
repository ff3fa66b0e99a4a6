// The memory of another process of this host, which this one reads through the kernel
// (process_vm_readv(2)): data goes once, from where it lies to where it is wanted.
//
// The kernel allows it to processes of one user, unless Yama's ptrace_scope, a seccomp filter or a
// process that is not dumpable forbids it; a first read finds out. A process is known by its number
// alone there, which another one may have once it has ended. So it keeps a word with a value of its
// own at a known address, and each read looks at that, after the data and in the same call.

#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace pydist {

// Reading is thread safe.
class ProcessMemory {
 public:
  ProcessMemory() = default;  // of none: can't be read
  // Of the process that has the number `pid` here, and the value `mark` at `mark_address`.
  ProcessMemory(pid_t pid, std::uint64_t mark_address, std::uint64_t mark) noexcept
      : pid_(pid), mark_address_(mark_address), mark_(mark) {}

  // Copies what lies at `address` of that process. 0; ESRCH where the process has ended, whoever
  // may have its number now; or another errno where it runs: EFAULT where nothing, or what is no
  // memory, lies there. A process that the system has killed for want of memory may have lost some
  // before it has ended.
  [[nodiscard]] int read(void* target, std::uint64_t address, std::size_t bytes) const noexcept;

  // Why nothing can be read there, as read() says; 0 where it can.
  [[nodiscard]] int obstacle() const noexcept;
  // Whether the byte there can be read: not memory of a device, say.
  [[nodiscard]] bool has(std::uint64_t address) const noexcept;

 private:
  pid_t pid_ = 0;
  std::uint64_t mark_address_ = 0;
  std::uint64_t mark_ = 0;
};

}  // namespace pydist
