#include "memory/symmetric_heap.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"
#include "base/fork.h"
#include "memory/memory_room.h"

namespace pydist {
namespace {

constexpr std::size_t kTableBytes = 1024 * sizeof(std::uint64_t);
constexpr unsigned kOffsetBits = 48;
constexpr std::uint64_t kOffsetMask = (std::uint64_t{1} << kOffsetBits) - 1;
constexpr const char* kPurpose = "the symmetric heap";

}  // namespace

SymmetricHeap::Range SymmetricHeap::range_of(const Placement& placement) noexcept {
  return placement.extent_bytes != 0 ? Range{0, placement.extent_bytes}
                                     : Range{placement.offset, placement.bytes};
}

void SymmetricHeap::check(const Placement& placement, std::size_t part_bytes) {
  PYDIST_CHECK(placement.block < kBlocks && placement.offset <= part_bytes &&
               placement.bytes <= part_bytes - placement.offset);
}

std::byte* SymmetricHeap::part(const Extent& extent, int rank) const noexcept {
  return extent.segment.data() + static_cast<std::size_t>(rank) * extent.part_bytes;
}

std::atomic<std::uint64_t>& SymmetricHeap::freed(const Extent& extent, int rank,
                                                 std::uint64_t block) const noexcept {
  return reinterpret_cast<std::atomic<std::uint64_t>*>(part(extent, rank))[block];
}

void SymmetricHeap::reclaim() {
  for (Extent& extent : extents_) {
    for (std::size_t index = 0; index < extent.blocks.size(); ++index) {
      Block& block = extent.blocks[index];
      if (block.bytes == 0) {
        continue;
      }
      bool all_freed = true;
      for (int rank = 0; rank < size_ && all_freed; ++rank) {
        all_freed = freed(extent, rank, index).load(std::memory_order_acquire) == block.uses;
      }
      if (all_freed) {
        extent.allocator.release(block.offset, block.bytes);
        block.bytes = 0;
      }
    }
  }
}

bool SymmetricHeap::place(std::uint64_t index, std::size_t bytes, Placement& placement) {
  Extent& extent = extents_[index];
  const auto unused = std::find_if(extent.blocks.begin(), extent.blocks.end(),
                                   [](const Block& block) { return block.bytes == 0; });
  if (unused == extent.blocks.end() && extent.blocks.size() == kBlocks) {
    return false;
  }
  const auto offset = extent.allocator.allocate(bytes);
  if (!offset) {
    return false;
  }
  const auto block_index = static_cast<std::size_t>(unused - extent.blocks.begin());
  Block& block = unused == extent.blocks.end() ? extent.blocks.emplace_back() : *unused;
  block.bytes = bytes;
  block.offset = *offset;
  ++block.uses;
  placement.extent = index;
  placement.block = block_index;
  placement.offset = kTableBytes + *offset;
  placement.bytes = bytes;
  placement.needs_memory = extent.is_trimmed ? 1 : 0;
  return true;
}

void SymmetricHeap::create_extent(std::size_t bytes) {
  if (extents_.size() == bases_.size()) {
    throw TransportError(
        "The symmetric heap cannot grow any further: it has 1024 extents. Free "
        "tensors on every rank, or allocate fewer, larger ones.");
  }
  // A part's offsets fit into a reference, and its size times the ranks into a size.
  if (bytes >= (std::size_t{1} << kOffsetBits) / static_cast<std::size_t>(size_) / 2) {
    throw TransportError(join("No machine has room for ", bytes, " bytes of symmetric memory on ",
                              "each of ", size_, " ranks; is the shape right?"));
  }
  const std::size_t part_bytes =
      round_up(kTableBytes + std::max(bytes, kMinExtentBytes), page_bytes());
  // No range serves twice: ranks let go of one that was given up at different times.
  const std::size_t begin = file_bytes_;
  file_.grow(begin + part_bytes * static_cast<std::size_t>(size_));
  add_extent(begin, part_bytes);
  file_bytes_ += part_bytes * static_cast<std::size_t>(size_);
  extents_.back().allocator = HeapAllocator(part_bytes - kTableBytes);
}

void SymmetricHeap::add_extent(std::size_t begin, std::size_t part_bytes) {
  SharedSegment segment = file_.map(begin, part_bytes * static_cast<std::size_t>(size_));
  Extent& extent = extents_.emplace_back();
  extent.segment = std::move(segment);
  extent.begin = begin;
  extent.part_bytes = part_bytes;
}

SymmetricHeap::Placement SymmetricHeap::choose_place(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  PYDIST_CHECK(rank_ == 0);
  // A block has at least one byte, so that it has an address and can be told from an unused one.
  bytes = std::max<std::size_t>(bytes, 1);
  reclaim();
  Placement placement;
  for (std::uint64_t index = 0; index < extents_.size(); ++index) {
    if (place(index, bytes, placement)) {
      return placement;
    }
  }
  create_extent(bytes);
  PYDIST_CHECK(place(extents_.size() - 1, bytes, placement));
  placement.extent_begin = extents_.back().begin;
  placement.extent_bytes = extents_.back().part_bytes;
  placement.needs_memory = 1;
  return placement;
}

void SymmetricHeap::trim() {
  const std::lock_guard lock(mutex_);
  PYDIST_CHECK(rank_ == 0);
  reclaim();
  for (Extent& extent : extents_) {
    const bool is_used = std::any_of(extent.blocks.begin(), extent.blocks.end(),
                                     [](const Block& block) { return block.bytes != 0; });
    if (is_used) {
      continue;
    }
    extent.is_trimmed = true;
    // The counters of freed blocks stay; they fill whole pages.
    for (int rank = 0; rank < size_; ++rank) {
      const std::size_t begin =
          round_up(static_cast<std::size_t>(rank) * extent.part_bytes + kTableBytes, page_bytes());
      const std::size_t end = static_cast<std::size_t>(rank + 1) * extent.part_bytes;
      extent.segment.discard(begin, end - begin);
    }
  }
}

void SymmetricHeap::map(const Placement& placement) {
  const std::lock_guard lock(mutex_);
  if (placement.extent_bytes != 0 && rank_ != 0) {
    PYDIST_CHECK(placement.extent == extents_.size() && placement.extent < bases_.size() &&
                 placement.extent_bytes <
                     (std::uint64_t{1} << kOffsetBits) / static_cast<std::uint64_t>(size_));
    check(placement, placement.extent_bytes);
    add_extent(placement.extent_begin, placement.extent_bytes);
  }
  check_memory_room(range_of(placement).bytes, kPurpose, takers_);
}

void SymmetricHeap::reserve(const Placement& placement) {
  const std::lock_guard lock(mutex_);
  const Extent& extent = extents_.at(placement.extent);
  check(placement, extent.part_bytes);
  const Range range = range_of(placement);
  extent.segment.reserve(static_cast<std::size_t>(rank_) * extent.part_bytes + range.begin,
                         range.bytes, kPurpose);
}

void SymmetricHeap::give_up(const Placement& placement) noexcept {
  const std::lock_guard lock(mutex_);
  if (placement.extent >= extents_.size()) {
    return;  // this rank could not map it
  }
  Extent& extent = extents_[placement.extent];
  // Whole pages: those at the ends may belong to a neighbouring block, too.
  const Range range = range_of(placement);
  const std::size_t own = static_cast<std::size_t>(rank_) * extent.part_bytes;
  const std::size_t begin = round_up(own + range.begin, page_bytes());
  const std::size_t end = (own + range.begin + range.bytes) / page_bytes() * page_bytes();
  // Memory that was there before stays.
  if (placement.needs_memory != 0 && begin < end) {
    extent.segment.discard(begin, end - begin);
  }
  if (placement.extent_bytes != 0) {
    extents_.pop_back();
  } else if (rank_ == 0) {
    Block& block = extent.blocks[placement.block];
    extent.allocator.release(block.offset, block.bytes);
    block.bytes = 0;
    --block.uses;  // nobody will free it
  }
}

std::byte* SymmetricHeap::take(const Placement& placement) {
  const std::lock_guard lock(mutex_);
  Extent& extent = extents_.at(placement.extent);
  check(placement, extent.part_bytes);
  extent.taken.at(placement.block) = {placement.offset, placement.bytes};
  if (placement.extent == visible_extents_.load(std::memory_order_relaxed)) {
    bases_[placement.extent] = part(extent, rank_);
    segments_[placement.extent] = extent.segment.data();
    part_bytes_[placement.extent] = extent.part_bytes;
    visible_extents_.store(placement.extent + 1, std::memory_order_release);
    extent.segment.populate(static_cast<std::size_t>(rank_) * extent.part_bytes, extent.part_bytes);
  }
  return part(extent, rank_) + placement.offset;
}

void SymmetricHeap::release(const Placement& placement) noexcept {
  if (in_forked_child()) {
    return;  // a copy of the tensor dies here; the rank's own lives on
  }
  const std::lock_guard lock(mutex_);
  Extent& extent = extents_[placement.extent];
  extent.taken[placement.block] = {};
  freed(extent, rank_, placement.block).fetch_add(1, std::memory_order_release);
}

void SymmetricHeap::keep_others_out() {
  const std::lock_guard lock(mutex_);
  for (const Extent& extent : extents_) {
    const std::size_t own = static_cast<std::size_t>(rank_) * extent.part_bytes;
    std::vector<Range> blocks;
    std::copy_if(extent.taken.begin(), extent.taken.end(), std::back_inserter(blocks),
                 [](const Range& block) { return block.bytes != 0; });
    std::sort(blocks.begin(), blocks.end(),
              [](const Range& one, const Range& other) { return one.begin < other.begin; });
    // Whole pages, each once: blocks may share one.
    std::size_t done = 0;
    for (const Range& block : blocks) {
      const std::size_t begin = std::max(done, (own + block.begin) / page_bytes() * page_bytes());
      const std::size_t end = round_up(own + block.begin + block.bytes, page_bytes());
      if (begin < end) {
        extent.segment.make_private(begin, end - begin);
        done = end;
      }
    }
  }
}

HeapReference SymmetricHeap::find(const void* data, std::size_t bytes) const noexcept {
  const auto* address = static_cast<const std::byte*>(data);
  const std::size_t count = visible_extents_.load(std::memory_order_acquire);
  for (std::size_t index = 0; index < count; ++index) {
    const std::byte* base = bases_[index];
    if (address >= base && address + bytes <= base + part_bytes_[index]) {
      return ((index + 1) << kOffsetBits) | static_cast<std::uint64_t>(address - base);
    }
  }
  return 0;
}

bool SymmetricHeap::has(HeapReference reference, std::uint64_t bytes) const noexcept {
  const std::size_t index = (reference >> kOffsetBits) - 1;
  const std::uint64_t offset = reference & kOffsetMask;
  return index < visible_extents_.load(std::memory_order_acquire) && offset <= part_bytes_[index] &&
         bytes <= part_bytes_[index] - offset;
}

std::byte* SymmetricHeap::address(int rank, HeapReference reference) const noexcept {
  const std::size_t index = (reference >> kOffsetBits) - 1;
  return segments_[index] + static_cast<std::size_t>(rank) * part_bytes_[index] +
         (reference & kOffsetMask);
}

}  // namespace pydist
