#include "memory/process_memory.h"

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>

namespace pydist {
namespace {

// The kernel takes somewhat less than 2 GiB at a time.
constexpr std::size_t kMostBytes = std::size_t{1} << 30;

// Nothing is ever read through it here.
void* pointer(std::uint64_t address) noexcept {
  static_assert(sizeof(void*) == sizeof address);
  return std::bit_cast<void*>(address);
}

}  // namespace

int ProcessMemory::read(void* target, std::uint64_t address, std::size_t bytes) const noexcept {
  auto* place = static_cast<std::byte*>(target);
  do {
    const std::size_t now = std::min(bytes, kMostBytes);
    std::uint64_t seen = 0;
    const std::array<iovec, 2> here = {{{place, now}, {&seen, sizeof seen}}};
    const std::array<iovec, 2> there = {
        {{pointer(address), now}, {pointer(mark_address_), sizeof seen}}};
    const ssize_t count =
        ::process_vm_readv(pid_, here.data(), here.size(), there.data(), there.size(), 0);
    if (count != static_cast<ssize_t>(now + sizeof seen)) {
      const int error = count < 0 ? errno : EFAULT;
      const int why = obstacle();
      return why == 0 ? error : why;
    }
    if (seen != mark_) {
      return ESRCH;
    }
    place += now;
    address += now;
    bytes -= now;
  } while (bytes != 0);
  return 0;
}

int ProcessMemory::obstacle() const noexcept {
  std::uint64_t seen = 0;
  const iovec here = {&seen, sizeof seen};
  const iovec there = {pointer(mark_address_), sizeof seen};
  if (pid_ == 0) {
    return ESRCH;
  }
  if (::process_vm_readv(pid_, &here, 1, &there, 1, 0) != static_cast<ssize_t>(sizeof seen)) {
    return errno == EFAULT ? ESRCH : errno;  // another process has nothing there
  }
  return seen == mark_ ? 0 : ESRCH;
}

bool ProcessMemory::has(std::uint64_t address) const noexcept {
  char byte = 0;
  const iovec here = {&byte, 1};
  const iovec there = {pointer(address), 1};
  return ::process_vm_readv(pid_, &here, 1, &there, 1, 0) == 1;
}

}  // namespace pydist
