// The symmetric heap of the ranks that a group has on one host: memory of each of them that every
// other one can address, so that collectives on it copy nothing in or out. Ranks are numbered here
// as they are on the host: the first has number 0.
//
// The heap is one shared file, which the ranks have from the beginning, and grows by extents. An
// extent is a range of the file with an equal part for each rank; a block lies at the same offset
// of every part. Rank 0 decides where a block goes (choose_place) and the group's
// agreement protocol tells the others (the communicator runs it); rank 0 alone knows what is free.
// Each rank reserves its own part, so the memory lies on its own NUMA node and its own cgroup pays
// for it. A rank frees its part of a block by itself; rank 0 reuses the block once every rank has.
//
// A part:  | one word a block: how many times this rank has freed it | data |
//
// Thread safe: blocks are freed by whichever thread drops the last reference.

#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "memory/heap_allocator.h"
#include "memory/shared_segment.h"

namespace pydist {

// Where a buffer lies in the heap, the same on every rank: 0 for nowhere.
using HeapReference = std::uint64_t;

class SymmetricHeap {
 public:
  // `takers`: memory_limits() of each rank.
  SymmetricHeap(int rank, int size, SharedFile file, std::vector<std::string> takers)
      : rank_(rank), size_(size), file_(std::move(file)), takers_(std::move(takers)) {}

  // A block, as rank 0 publishes it. All ranks agree on it.
  struct Placement {
    std::uint64_t extent = 0;        // index
    std::uint64_t extent_begin = 0;  // of a new extent, in the file
    std::uint64_t extent_bytes = 0;  // of one rank's part; not 0 if the extent is new
    std::uint64_t block = 0;         // index in the extent
    std::uint64_t offset = 0;        // in each part
    std::uint64_t bytes = 0;
    std::uint64_t needs_memory = 0;  // whether every rank has to map() and reserve() it
  };

  // Rank 0 only: finds a place for `bytes`, taking back what every rank has freed, or decides on a
  // new extent and makes the file long enough. Throws TransportError where that is impossible.
  [[nodiscard]] Placement choose_place(std::size_t bytes);

  // What every rank does for a placement that needs memory: first it maps the extent, if that is
  // new, and looks whether there is room for what all ranks are about to reserve; once every rank
  // has found room, it reserves its own part. Both throw TransportError.
  void map(const Placement& placement);
  void reserve(const Placement& placement);
  // Undoes choose_place(), map() and reserve(), as far as they came: some rank has failed.
  void give_up(const Placement& placement) noexcept;

  // Rank 0 only: gives back the memory of extents in which every rank has freed every block. The
  // extents keep their addresses; from then on, a block gets memory when it is allocated.
  void trim();

  // Hands out a placed block to this rank.
  [[nodiscard]] std::byte* take(const Placement& placement);
  // This rank no longer uses it.
  void release(const Placement& placement) noexcept;

  // From now on the blocks that this rank has taken and not released are memory of its own, at the
  // same addresses and with what they hold: what other processes write does not reach them any
  // more, nor the other way round. For a heap whose group has failed. Throws TransportError where
  // there is no room for the copy.
  void keep_others_out();

  // Where [data, data + bytes) lies, if it lies in this rank's parts.
  [[nodiscard]] HeapReference find(const void* data, std::size_t bytes) const noexcept;
  // Whether so many bytes from there on lie in every rank's part.
  [[nodiscard]] bool has(HeapReference reference, std::uint64_t bytes) const noexcept;
  // The same place in `rank`'s part. Precondition: has().
  [[nodiscard]] std::byte* address(int rank, HeapReference reference) const noexcept;

 private:
  // More blocks than this in one extent and the next one starts.
  static constexpr std::size_t kBlocks = 1024;
  static constexpr std::size_t kMinExtentBytes = std::size_t{1} << 20;

  struct Block {
    std::size_t bytes = 0;  // 0: not in use (rank 0's view)
    std::size_t offset = 0;
    std::uint64_t uses = 0;  // how many times it has been handed out
  };
  // Bytes of a rank's part.
  struct Range {
    std::size_t begin = 0;
    std::size_t bytes = 0;
  };
  struct Extent {
    SharedSegment segment;
    std::size_t begin = 0;  // in the file
    std::size_t part_bytes = 0;
    std::array<Range, kBlocks> taken{};  // by block: what this rank uses; no bytes where nothing
    HeapAllocator allocator{0};          // rank 0's view
    std::vector<Block> blocks;           // rank 0's view
    bool is_trimmed = false;             // only blocks in use have memory (rank 0's view)
  };

  // What a rank reserves for a placement.
  [[nodiscard]] static Range range_of(const Placement& placement) noexcept;
  // Throws where a placement, which has come through shared memory, lies outside of its extent.
  static void check(const Placement& placement, std::size_t part_bytes);
  [[nodiscard]] std::byte* part(const Extent& extent, int rank) const noexcept;
  [[nodiscard]] std::atomic<std::uint64_t>& freed(const Extent& extent, int rank,
                                                  std::uint64_t block) const noexcept;
  void reclaim();
  [[nodiscard]] bool place(std::uint64_t index, std::size_t bytes, Placement& placement);
  void create_extent(std::size_t bytes);
  void add_extent(std::size_t begin, std::size_t part_bytes);

  const int rank_;
  const int size_;
  const SharedFile file_;
  const std::vector<std::string> takers_;
  std::mutex mutex_;
  std::size_t file_bytes_ = 0;  // rank 0's view; guarded by mutex_
  // A deque: extents keep their addresses while the heap grows. Guarded by mutex_.
  std::deque<Extent> extents_;
  // How many extents find() and address() may look at without the lock.
  std::atomic<std::size_t> visible_extents_{0};
  std::array<std::byte*, 1024> bases_{};  // of this rank's part, for find()
  std::array<std::size_t, 1024> part_bytes_{};
  std::array<std::byte*, 1024> segments_{};
};

}  // namespace pydist
