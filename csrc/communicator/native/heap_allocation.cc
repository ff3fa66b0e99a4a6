#include "communicator/native/heap_allocation.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "base/error.h"
#include "collectives/call.h"
#include "collectives/call_mismatch.h"
#include "health/text_field.h"
#include "memory/memory_room.h"

namespace pydist {
namespace {

// What rank 0 posts: where the block goes, or that there is no place.
struct Decision {
  SymmetricHeap::Placement placement;
  std::uint64_t is_refused = 0;
};
static_assert(sizeof(Decision) <= kInlineBytes);

Call allocation_call(std::size_t count) {
  return {OpKind::kAllocate, DType::kUInt8, DType::kUInt8, ReduceOp::kSum, /*root=*/0,
          /*factor=*/1.0,    Blocks(),      Blocks(),      count};
}

// All ranks tell each other their errors; the result gets that of the lowest rank which has one.
// Group::begin() has numbered it.
Task share_error(Group& group, HeapAllocation& result) {
  using Text = std::array<char, kInlineBytes>;
  const Call call = allocation_call(0);
  co_await group.may_post();
  describe_call(group, call);
  Text mine{};
  write_text(mine, result.error);
  std::memcpy(group.my_post().lines.data(), mine.data(), mine.size());
  group.publish_post();
  co_await group.posted_by_all();
  group.note_all_posted();
  check_agreement(group, call, 0, group.size());
  const std::string own = std::exchange(result.error, std::string());
  for (int rank = 0; rank < group.size() && result.error.empty(); ++rank) {
    Text text{};
    std::memcpy(text.data(), group.post(rank).lines.data(), text.size());
    if (text[0] != '\0') {
      result.error = join("rank ", rank, ": ", rank == group.rank() ? own : read_text(text));
      result.failed_rank = rank;
    }
  }
  group.complete();
}

// Runs a step of an allocation that may fail on this rank alone.
template <typename Step>
void attempt(std::string& error, const Step& step) {
  try {
    step();
  } catch (const std::exception& thrown) {
    error = thrown.what();
    if (error.empty()) {
      error = "it failed without a reason.";
    }
  }
}

}  // namespace

Task allocate_on_heap(Group& group, SymmetricHeap& heap, std::size_t bytes,
                      HeapAllocation& result) {
  Decision decision;
  if (group.rank() == 0) {
    attempt(result.error, [&] { decision.placement = heap.choose_place(bytes); });
    decision.is_refused = result.error.empty() ? 0 : 1;
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
    group.begin();
    co_await share_error(group, result);
    co_return;
  }
  const SymmetricHeap::Placement& placement = decision.placement;
  if (placement.needs_memory != 0) {
    attempt(result.error, [&] { heap.map(placement); });
    group.begin();
    co_await share_error(group, result);
    if (result.error.empty()) {
      attempt(result.error, [&] { heap.reserve(placement); });
      group.begin();
      co_await share_error(group, result);
    }
    if (!result.error.empty()) {
      heap.give_up(placement);
      co_return;
    }
  }
  result.placement = placement;
  result.data = heap.take(placement);
}

Task allocate_apart(Group& group, std::size_t bytes, HeapAllocation& result) {
  attempt(result.error, [&] {
    check_memory_room(bytes, "memory for collectives");
    result.own = SharedSegment::create("memory", std::max<std::size_t>(bytes, 1));
    result.own.reserve(0, result.own.bytes(), "memory for collectives");
  });
  co_await share_error(group, result);
}

}  // namespace pydist
