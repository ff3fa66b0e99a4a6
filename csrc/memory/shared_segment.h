// Memory that several processes of one host map: a memfd, so nothing has a name that could go
// stale after a crash, and nothing depends on the size of /dev/shm.
//
// Creating a segment takes address space only. A range is backed by memory once somebody has
// reserved it; touching an unreserved range on a full machine would be a SIGBUS, so nobody does.
// Owned by whoever holds the object; the memory lives until the last process has let go of it.
//
// A process maps a segment once, however many of its ranks are threads: they then see each other's
// writes at the same addresses, which is what makes the thread sanitizer see them too.
//
// A SharedFile is the same memory without a size: it grows, and its ranges are mapped one by one.

#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "memory/file_descriptor.h"

namespace pydist {

// Whether a process may write what it maps.
enum class Access { kWrite, kRead };

class SharedSegment {
 public:
  SharedSegment() = default;

  // A new, zeroed segment, not reserved. `label` shows in /proc/<pid>/maps.
  [[nodiscard]] static SharedSegment create(const std::string& label, std::size_t bytes);

  // Maps a segment that another process created. Throws TransportError unless it has exactly
  // `bytes` (0: any size). `access` counts where this process has not mapped the segment already.
  [[nodiscard]] static SharedSegment map(FileDescriptor fd, std::size_t bytes = 0,
                                         Access access = Access::kWrite);

  // From now on nobody can get write access to the segment; whoever has mapped it for writing keeps
  // that. Reserve what is needed before. Without effect before Linux 5.1.
  void refuse_further_writers() const noexcept;

  // Backs [offset, offset + length) with memory. Throws TransportError where there is not enough;
  // `purpose` tells the reader for what. Thread safe; idempotent.
  void reserve(std::size_t offset, std::size_t length, const std::string& purpose) const;

  // Gives the memory behind a range of whole pages back, on behalf of all who map it; it reads as
  // zeros then, and is not reserved. A hint.
  void discard(std::size_t offset, std::size_t length) const noexcept;

  // Replaces a range of whole pages in this process by a copy of its own, at the same addresses.
  // Other threads may use the memory meanwhile. Throws TransportError where there is no room.
  void make_private(std::size_t offset, std::size_t length) const;
  // The same for a child that has just been forked: takes no lock, allocates nothing and looks for
  // no room. Returns 0, or what the system says is wrong.
  [[nodiscard]] int try_make_private(std::size_t offset, std::size_t length) const noexcept;

  // Enters the range into this process's page tables ahead of its first use. A hint.
  void populate(std::size_t offset, std::size_t length) const noexcept;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept;
  [[nodiscard]] int fd() const noexcept;

 private:
  friend class SharedFile;
  class Mapping;
  [[nodiscard]] static SharedSegment find_or_map(const std::shared_ptr<const FileDescriptor>& fd,
                                                 std::size_t offset, std::size_t bytes,
                                                 Access access);

  std::shared_ptr<Mapping> mapping_;
  std::byte* data_ = nullptr;
};

class SharedFile {
 public:
  SharedFile() = default;
  // One that another process created.
  explicit SharedFile(FileDescriptor fd);

  // A new, empty one.
  [[nodiscard]] static SharedFile create(const std::string& label);

  // Makes it at least so long; never shorter. Throws TransportError where the system does not allow
  // that. One process at a time.
  void grow(std::size_t bytes) const;

  // A range, of whole pages, as a segment, whose offsets count from the beginning of the range.
  [[nodiscard]] SharedSegment map(std::size_t offset, std::size_t bytes) const;

  [[nodiscard]] int fd() const noexcept { return fd_ ? fd_->get() : -1; }

 private:
  std::shared_ptr<const FileDescriptor> fd_;  // shared with what is mapped
};

[[nodiscard]] std::size_t page_bytes() noexcept;

[[nodiscard]] constexpr std::size_t round_up(std::size_t value, std::size_t multiple) noexcept {
  return (value + multiple - 1) / multiple * multiple;
}

}  // namespace pydist
