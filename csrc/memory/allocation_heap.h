// Ordinary memory of one process that other processes of the host may read, and nobody but the
// process itself may write: what torch's CPU allocator takes from within share_allocations().
//
// It is one shared segment of a bounded size, which its owner maps for writing and whoever gets
// read_only_descriptor() for reading. Only what is handed out takes memory: the heap reserves
// grains of 2 MiB before it hands anything out, so that a full machine is no SIGBUS. Freed blocks
// are handed out again; memory that has not been needed for a while goes back to the system.
//
// Blocks are found in two steps: a freed block is kept for the next request of its very size, as
// programs repeat themselves; otherwise HeapAllocator looks for a place.
//
// Thread safe: blocks are freed by whichever thread drops the last tensor. The heap lives as long
// as somebody holds it, or a block of it is in use.
//
// Note [Heaps and forks]
// A shared mapping has no copy on write: a forked child would write into its parent's tensors. So
// the child replaces the blocks that are in use by copies of its own, at the same addresses, before
// fork() returns there; the parent's fork() returns once the child has done so, or has died. What
// other threads of the parent write meanwhile may or may not be in the copy. The child never
// touches the parent's bookkeeping: it allocates nothing here and frees nothing. A child for whose
// copy there is no room ends with a sentence on its standard error. posix_spawn() and vfork() copy
// nothing, and need not.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/fork.h"
#include "memory/file_descriptor.h"
#include "memory/heap_allocator.h"
#include "memory/shared_segment.h"

namespace pydist {

class AllocationHeap : public std::enable_shared_from_this<AllocationHeap> {
 public:
  // What is reserved at a time, and given back.
  static constexpr std::size_t kGrainBytes = std::size_t{2} << 20;

  // An empty one that never holds more than `max_bytes`, rounded up to whole grains. Throws
  // TransportError where the system gives no address space or no descriptor.
  [[nodiscard]] static std::shared_ptr<AllocationHeap> create(std::size_t max_bytes);

  AllocationHeap(const AllocationHeap&) = delete;
  AllocationHeap& operator=(const AllocationHeap&) = delete;
  ~AllocationHeap();

  // A block of at least so many bytes, aligned to 256, not zeroed. Null where the heap is full, the
  // machine has no room, or this is a forked child: then ordinary memory has to do.
  [[nodiscard]] std::byte* allocate(std::size_t bytes) noexcept;
  // Gives back what allocate() returned. In a forked child nothing happens.
  void release(std::byte* block) noexcept;
  // Gives the memory of all grains back in which nothing is in use.
  void trim() noexcept;

  [[nodiscard]] bool contains(const void* address) const noexcept {
    const auto* const place = static_cast<const std::byte*>(address);
    return place >= segment_.data() && place < segment_.data() + segment_.bytes();
  }
  // The heap of this process in which `address` lies; null where it lies in none.
  [[nodiscard]] static std::shared_ptr<AllocationHeap> of(const void* address) noexcept;

  // The heap that the process allocates from at present; null where it uses none. Unlike a variable
  // with a lock of its own, a forked child can always read it.
  [[nodiscard]] static std::shared_ptr<AllocationHeap> current() noexcept;
  static void set_current(std::shared_ptr<AllocationHeap> heap) noexcept;

  // As the owner maps it.
  [[nodiscard]] const SharedSegment& segment() const noexcept { return segment_; }
  // For other processes: with it they can map the heap for reading alone. Throws TransportError.
  [[nodiscard]] FileDescriptor read_only_descriptor() const;

  // Bytes of blocks in use, and of memory that the heap has reserved.
  [[nodiscard]] std::size_t used_bytes() const noexcept;
  [[nodiscard]] std::size_t reserved_bytes() const noexcept;

 private:
  explicit AllocationHeap(std::size_t bytes);

  friend class HeapForks;
  // The rest with mutex_.
  [[nodiscard]] std::byte* take(std::size_t bytes);
  [[nodiscard]] bool reserve(std::size_t offset, std::size_t bytes);
  void forget_sizes();
  void give_back(std::size_t most_bytes) noexcept;
  void count_operation() noexcept;

  const Birth birth_;
  const SharedSegment segment_;
  mutable std::mutex mutex_;
  // All of these are guarded by mutex_.
  HeapAllocator free_;
  std::unordered_map<std::size_t, std::vector<std::size_t>> freed_;  // by size: offsets
  std::unordered_map<std::size_t, std::size_t> used_;                // by offset: size
  std::vector<bool> is_reserved_;                                    // by grain
  std::size_t kept_bytes_ = 0;                                       // of freed_
  std::size_t used_bytes_ = 0;
  std::size_t reserved_bytes_ = 0;
  // A period is so many operations; see count_operation().
  std::uint64_t operations_ = 0;
  std::size_t most_used_ = 0;               // in this period
  std::size_t most_used_before_ = 0;        // in the last one
  std::uint64_t next_attempt_ = 0;          // to reserve: when the machine has had no room
  std::shared_ptr<AllocationHeap> itself_;  // while a block is in use
};

}  // namespace pydist
