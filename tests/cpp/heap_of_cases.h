// What the buffers of a rank's cases lie in, where that is not ordinary memory.

#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "collective_case.h"
#include "communicator/communicator.h"
#include "memory/allocation_heap.h"

namespace pydist::testing {

class HeapOfCases {
 public:
  // All ranks of the group construct it together. `bytes`: for the buffers of a rank.
  HeapOfCases(Communicator& group, int rank, Placement placement, std::size_t bytes)
      : bytes_(bytes) {
    const bool has_symmetric = placement == Placement::kHeap || placement == Placement::kMixed ||
                               placement == Placement::kBothHeaps;
    if (has_symmetric) {
      symmetric_ = group.allocate(bytes, Device{});
    }
    if (placement == Placement::kOrdinary ||
        (has_symmetric && placement != Placement::kBothHeaps)) {
      return;
    }
    // Null in a world of one.
    shared_ = group.share_allocations(2 * bytes, "");
    if (shared_ && (placement != Placement::kBothHeaps || rank % 2 != 0)) {
      block_ = shared_->allocate(bytes);
    }
  }
  HeapOfCases(const HeapOfCases&) = delete;
  HeapOfCases& operator=(const HeapOfCases&) = delete;
  ~HeapOfCases() {
    if (block_ != nullptr) {
      shared_->release(block_);
    }
  }

  [[nodiscard]] std::span<std::byte> bytes() const {
    if (block_ != nullptr) {
      return {block_, bytes_};
    }
    return symmetric_ ? std::span(static_cast<std::byte*>(symmetric_->data()), symmetric_->bytes())
                      : std::span<std::byte>();
  }

 private:
  const std::size_t bytes_;
  MemoryPtr symmetric_;
  std::shared_ptr<AllocationHeap> shared_;
  std::byte* block_ = nullptr;
};

}  // namespace pydist::testing
