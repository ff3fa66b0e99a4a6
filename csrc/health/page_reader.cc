#include "health/page_reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "base/error.h"
#include "health/process_page.h"

namespace pydist {

PageReading read_page(int fd) {
  constexpr std::size_t kBytes = sizeof(ProcessPage);
  struct stat status{};
  if (::fstat(fd, &status) != 0) {
    throw system_error("Cannot look at the page of a process (fstat)", errno);
  }
  // Its owner can't shrink it under a reader's feet.
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (status.st_size < static_cast<off_t>(kBytes) ||
      status.st_size >= static_cast<off_t>(kBytes) + 65536 || seals < 0 ||
      (seals & F_SEAL_SHRINK) == 0) {
    throw InvalidUsage(join("This is no page of a process of this version of pydist: it has ",
                            status.st_size, " bytes, expected ", kBytes,
                            (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
                                ? ", and may be made shorter while it is read."
                                : "."));
  }
  void* const memory = ::mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    throw system_error("Cannot map the page of a process (mmap)", errno);
  }
  const auto unmap = [](void* mapped) { ::munmap(mapped, kBytes); };
  const std::unique_ptr<void, decltype(unmap)> mapping(memory, unmap);
  const auto& page = *static_cast<const ProcessPage*>(memory);
  PageReading reading;
  reading.pid = page.pid.load(std::memory_order_relaxed);
  // Somebody else's memory, which may hold anything.
  reading.rank = std::max(0, page.rank_plus_one.load(std::memory_order_relaxed)) - 1;
  reading.has_departed = page.has_departed.load(std::memory_order_acquire) != 0;
  reading.entries = page.journal.read();
  reading.now_ns = monotonic_ns();
  const std::int64_t heartbeat = page.heartbeat_ns.load(std::memory_order_relaxed);
  reading.silent_s =
      heartbeat == 0
          ? 0.0
          : (static_cast<double>(reading.now_ns) - static_cast<double>(heartbeat)) * 1e-9;
  return reading;
}

}  // namespace pydist
