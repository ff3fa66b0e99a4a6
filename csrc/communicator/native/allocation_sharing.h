// How the ranks of a group come to read each other's allocation heaps.
//
// Each rank makes its heap, if it has none, and offers it to the others; each maps those of the
// ranks of its host, for reading alone; then all agree that every rank has done so, and only then
// does anybody offer memory that lies there (HeapWindow). Where one rank fails, all throw its
// error, and nothing is switched on. Two all_gathers; one where all ranks share already.

#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "communicator/communicator.h"
#include "communicator/peers/endpoint.h"
#include "memory/allocation_heap.h"
#include "memory/job_secret.h"
#include "topology/placement.h"

namespace pydist {

// What the group has. The references outlive the call.
struct SharingGroup {
  Communicator& communicator;
  Endpoint& endpoint;
  const std::vector<PeerPtr>& peers;
  const Placement& ranks;
  const JobSecret& secret;
};

// As Communicator::share_allocations(), in a group of several ranks.
[[nodiscard]] std::shared_ptr<AllocationHeap> share_allocations(
    const SharingGroup& group, std::optional<std::size_t> max_bytes, const std::string& refusal);

}  // namespace pydist
