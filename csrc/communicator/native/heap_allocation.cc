#include "communicator/native/heap_allocation.h"

#include <cstring>
#include <exception>

#include "base/error.h"
#include "collectives/call.h"
#include "collectives/fingerprint.h"

namespace pydist {
namespace {

// What rank 0 posts: where the block goes, or that there is no room.
struct Decision {
  SymmetricHeap::Placement placement;
  std::uint64_t is_refused = 0;
};
static_assert(sizeof(Decision) <= kInlineBytes);

std::string segment_key(const std::string& token, std::uint64_t extent) {
  return join(token, "/heap/", extent);
}

Call allocation_call(std::size_t count) {
  return {OpKind::kAllocate, DType::kUInt8, DType::kUInt8, ReduceOp::kSum, /*root=*/0,
          /*factor=*/1.0,    Blocks(),      Blocks(),      count};
}

}  // namespace

Task allocate_on_heap(Group& group, SymmetricHeap& heap, Endpoint& endpoint,
                      const std::string& rank0_address, const std::string& group_token,
                      std::size_t bytes, Deadline deadline, HeapAllocation& result) {
  Decision decision;
  if (group.rank() == 0) {
    bool is_placed = false;
    try {
      decision.placement = heap.choose_place(bytes);
      is_placed = true;
      if (decision.placement.extent_bytes != 0 && group.size() > 1) {
        endpoint.server().offer(segment_key(group_token, decision.placement.extent),
                                heap.segment(decision.placement.extent).fd());
      }
    } catch (const std::exception& error) {
      decision.is_refused = 1;
      result.error = error.what();
      if (is_placed) {
        // The extent is new, and nobody else will ever have it.
        heap.drop_extent(decision.placement.extent);
      }
    }
  }
  const Call call = allocation_call(bytes);
  co_await group.may_post();
  describe_call(group, call);
  std::memcpy(group.my_post().lines.data(), &decision, sizeof decision);
  group.publish_post();
  co_await group.posted_by_all();
  group.note_all_posted();
  check_agreement(group, call, 0, group.size());
  std::memcpy(&decision, group.post(0).lines.data(), sizeof decision);
  group.complete();

  if (decision.is_refused != 0) {
    if (group.rank() != 0) {
      result.error = join("rank 0 found no room for ", bytes,
                          " bytes of symmetric memory; its own message says why.");
    }
    co_return;
  }
  const SymmetricHeap::Placement& placement = decision.placement;
  if (placement.extent_bytes != 0 && group.size() > 1) {
    const std::string key = segment_key(group_token, placement.extent);
    if (group.rank() != 0) {
      try {
        heap.add_extent(placement,
                        SharedSegment::map(fetch_segment(rank0_address, key, deadline).fd));
      } catch (const std::exception& error) {
        result.error = join("The memory that rank 0 has made cannot be used here: ", error.what());
      }
    }
    // Everybody has it, or nobody keeps it.
    group.begin();
    co_await group.may_post();
    describe_call(group, allocation_call(0));
    const std::uint8_t failed = result.error.empty() ? 0 : 1;
    std::memcpy(group.my_post().lines.data(), &failed, sizeof failed);
    group.publish_post();
    co_await group.posted_by_all();
    group.note_all_posted();
    check_agreement(group, allocation_call(0), 0, group.size());
    for (int rank = 0; rank < group.size(); ++rank) {
      std::uint8_t rank_failed = 0;
      std::memcpy(&rank_failed, group.post(rank).lines.data(), sizeof rank_failed);
      if (rank_failed != 0 && result.error.empty()) {
        result.error = join("rank ", rank, " could not map ", placement.extent_bytes,
                            " bytes of symmetric memory; its own message says why.");
      }
    }
    group.complete();
    if (group.rank() == 0) {
      endpoint.server().withdraw(key);
    }
    if (!result.error.empty()) {
      heap.drop_extent(placement.extent);
      co_return;
    }
  }
  result.placement = placement;
  result.data = heap.take(placement);
}

}  // namespace pydist
