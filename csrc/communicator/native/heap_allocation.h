// Allocating on the symmetric heap: how the ranks of a group agree on a block.
//
// Each host has a heap of its own. The lowest rank on it decides where the block goes and posts it.
// Where that takes memory, all agree first that every rank has room for its part, and then that
// every rank has reserved it. Either every rank gets the block, or every rank gets the error of the
// lowest rank that failed, and the group stays sound.
//
// Nobody asks anybody for anything here but through posts, so the wait for a rank that was stopped
// or has died ends like that of any other collective.

#pragma once

#include <cstddef>
#include <string>

#include "collectives/group.h"
#include "collectives/task.h"
#include "memory/symmetric_heap.h"
#include "topology/placement.h"

namespace pydist {

struct HeapAllocation {
  SymmetricHeap::Placement placement;
  std::byte* data = nullptr;
  std::string error;     // empty: it worked
  int failed_rank = -1;  // whose error it is
};

// The collective. Group::begin() has numbered it; it numbers one more where there is no place or no
// room, and two where memory is reserved. The references outlive the task.
[[nodiscard]] Task allocate_on_heap(Group& group, SymmetricHeap& heap, const Placement& ranks,
                                    std::size_t bytes, HeapAllocation& result);

}  // namespace pydist
