// Memory that several processes of one host map: a memfd, so nothing has a name that could go
// stale after a crash, and nothing depends on the size of /dev/shm.
//
// Creating a segment takes address space only. A range is backed by memory once somebody has
// reserved it; touching an unreserved range on a full machine would be a SIGBUS, so nobody does.
// Owned by whoever holds the object; the memory lives until the last process has let go of it.
//
// A process maps a segment once, however many of its ranks are threads: they then see each other's
// writes at the same addresses, which is what makes the thread sanitizer see them too.

#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "memory/file_descriptor.h"

namespace pydist {

class SharedSegment {
 public:
  SharedSegment() = default;

  // A new, zeroed segment, not reserved. `label` shows in /proc/<pid>/maps.
  [[nodiscard]] static SharedSegment create(const std::string& label, std::size_t bytes);

  // Maps a segment that another process created. Throws TransportError unless it has exactly
  // `bytes` (0: any size).
  [[nodiscard]] static SharedSegment map(FileDescriptor fd, std::size_t bytes = 0);

  // Backs [offset, offset + length) with memory. Throws TransportError where there is not enough;
  // `purpose` tells the reader for what. Thread safe; idempotent.
  void reserve(std::size_t offset, std::size_t length, const std::string& purpose) const;

  // Gives the memory behind a range of whole pages back, on behalf of all who map it; it reads as
  // zeros then, and is not reserved. A hint.
  void discard(std::size_t offset, std::size_t length) const noexcept;

  // Enters the range into this process's page tables ahead of its first use. A hint.
  void populate(std::size_t offset, std::size_t length) const noexcept;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept;
  [[nodiscard]] int fd() const noexcept;

 private:
  class Mapping;
  [[nodiscard]] static std::shared_ptr<Mapping> find_or_map(FileDescriptor fd);

  std::shared_ptr<Mapping> mapping_;
  std::byte* data_ = nullptr;
};

[[nodiscard]] std::size_t page_bytes() noexcept;

[[nodiscard]] constexpr std::size_t round_up(std::size_t value, std::size_t multiple) noexcept {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace pydist
