#include "memory/symmetric_heap.h"

#include <algorithm>

#include "base/error.h"
#include "base/fork.h"

namespace pydist {
namespace {

constexpr std::size_t kTableBytes = 1024 * sizeof(std::uint64_t);
constexpr unsigned kOffsetBits = 48;

}  // namespace

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
  if (extent.is_trimmed) {
    try {
      for (int rank = 0; rank < size_; ++rank) {
        const std::size_t begin = static_cast<std::size_t>(rank) * extent.part_bytes + kTableBytes;
        extent.segment.reserve(begin + *offset, bytes, "a block of the symmetric heap");
      }
    } catch (...) {
      extent.allocator.release(*offset, bytes);
      throw;
    }
  }
  const auto block_index = static_cast<std::size_t>(unused - extent.blocks.begin());
  Block& block = unused == extent.blocks.end() ? extent.blocks.emplace_back() : *unused;
  block.bytes = bytes;
  block.offset = *offset;
  ++block.uses;
  placement.extent = index;
  placement.block = block_index;
  placement.offset = kTableBytes + *offset;
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
  SharedSegment segment =
      SharedSegment::create("heap", part_bytes * static_cast<std::size_t>(size_));
  segment.reserve(0, segment.bytes(), "an extent of the symmetric heap");
  Extent& extent = extents_.emplace_back();
  extent.segment = std::move(segment);
  extent.part_bytes = part_bytes;
  extent.allocator = HeapAllocator(part_bytes - kTableBytes);
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
  placement.extent_bytes = extents_.back().part_bytes;
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

void SymmetricHeap::add_extent(const Placement& placement, SharedSegment segment) {
  const std::lock_guard lock(mutex_);
  PYDIST_CHECK(placement.extent == extents_.size());
  PYDIST_CHECK(segment.bytes() == placement.extent_bytes * static_cast<std::size_t>(size_));
  Extent& extent = extents_.emplace_back();
  extent.segment = std::move(segment);
  extent.part_bytes = placement.extent_bytes;
}

void SymmetricHeap::drop_extent(std::uint64_t extent) {
  const std::lock_guard lock(mutex_);
  PYDIST_CHECK(extent >= visible_extents_.load(std::memory_order_relaxed));
  if (extents_.size() == extent + 1) {
    extents_.pop_back();
  }
}

const SharedSegment& SymmetricHeap::segment(std::uint64_t extent) const {
  const std::lock_guard lock(mutex_);
  return extents_.at(extent).segment;
}

std::byte* SymmetricHeap::take(const Placement& placement) {
  const std::lock_guard lock(mutex_);
  const Extent& extent = extents_.at(placement.extent);
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
  freed(extents_[placement.extent], rank_, placement.block).fetch_add(1, std::memory_order_release);
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

std::byte* SymmetricHeap::address(int rank, HeapReference reference) const noexcept {
  const std::size_t index = (reference >> kOffsetBits) - 1;
  return segments_[index] + static_cast<std::size_t>(rank) * part_bytes_[index] +
         (reference & ((std::uint64_t{1} << kOffsetBits) - 1));
}

}  // namespace pydist
