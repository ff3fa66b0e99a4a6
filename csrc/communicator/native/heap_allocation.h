// Allocating on the symmetric heap: how the ranks of a group agree on a block.
//
// Rank 0 decides where the block goes and posts it; when the heap has to grow, the others fetch the
// new extent from rank 0 and all agree that everybody has it. Either every rank gets the block or
// every rank gets the same error; the group stays sound.

#pragma once

#include <cstddef>
#include <string>

#include "base/deadline.h"
#include "collectives/group.h"
#include "collectives/task.h"
#include "communicator/native/endpoint.h"
#include "memory/symmetric_heap.h"

namespace pydist {

struct HeapAllocation {
  SymmetricHeap::Placement placement;
  std::byte* data = nullptr;
  std::string error;  // empty: it worked
};

// The collective. Group::begin() has numbered it; it numbers a second one where the heap grows.
// `rank0_address` is where rank 0 hands out segments, `group_token` what their keys begin with.
// The references outlive the task.
[[nodiscard]] Task allocate_on_heap(Group& group, SymmetricHeap& heap, Endpoint& endpoint,
                                    const std::string& rank0_address,
                                    const std::string& group_token, std::size_t bytes,
                                    Deadline deadline, HeapAllocation& result);

}  // namespace pydist
