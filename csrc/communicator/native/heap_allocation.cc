#include "communicator/native/heap_allocation.h"

#include <array>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "base/error.h"
#include "collectives/call.h"
#include "collectives/call_mismatch.h"
#include "health/text_field.h"

namespace pydist {
namespace {

// What the lowest rank of a host posts: where the block goes, or that there is no place.
struct Decision {
  SymmetricHeap::Placement place;
  std::uint64_t is_refused = 0;
};
static_assert(sizeof(Decision) <= kInlineBytes);

Decision decision_of(const Group& group, int rank) {
  Decision its;
  std::memcpy(&its, group.post(rank).lines.data(), sizeof its);
  return its;
}

Call allocation_call(std::size_t count) {
  return {OpKind::kAllocate, DType::kUInt8, DType::kUInt8, ReduceOp::kSum, /*root=*/0,
          /*factor=*/1.0,    Blocks(),      Blocks(),      count};
}

// What the ranks tell each other rides in their posts.
constexpr auto kInThePost = static_cast<std::uint8_t>(Offer::kInLines);

// All ranks tell each other their errors; the result gets that of the lowest rank which has one.
// Group::begin() has numbered it.
Task share_error(Group& group, HeapAllocation& result) {
  using Text = std::array<char, kInlineBytes>;
  const Call call = allocation_call(0);
  co_await group.may_post();
  describe_call(group, call, kInThePost);
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

Task allocate_on_heap(Group& group, SymmetricHeap& heap, const Placement& ranks, std::size_t bytes,
                      HeapAllocation& result) {
  const int leader = ranks.leader_of(ranks.host_of(group.rank()));
  Decision mine;
  if (group.rank() == leader) {
    attempt(result.error, [&] { mine.place = heap.choose_place(bytes); });
    mine.is_refused = result.error.empty() ? 0 : 1;
  }
  const Call call = allocation_call(bytes);
  co_await group.may_post();
  describe_call(group, call, kInThePost);
  std::memcpy(group.my_post().lines.data(), &mine, sizeof mine);
  group.publish_post();
  co_await group.posted_by_all();
  group.note_all_posted();
  check_agreement(group, call, 0, group.size());
  bool is_refused = false;
  bool needs_memory = false;
  for (int host = 0; host < ranks.hosts(); ++host) {
    const Decision its = decision_of(group, ranks.leader_of(host));
    is_refused = is_refused || its.is_refused != 0;
    needs_memory = needs_memory || its.place.needs_memory != 0;
  }
  const Decision decision = decision_of(group, leader);
  group.complete();

  const SymmetricHeap::Placement& place = decision.place;
  if (is_refused) {
    group.begin();
    co_await share_error(group, result);
  } else if (needs_memory) {
    // Also on a host that has it, for the others.
    const bool needs_it_here = place.needs_memory != 0;
    attempt(result.error, [&] {
      if (needs_it_here) {
        heap.map(place);
      }
    });
    group.begin();
    co_await share_error(group, result);
    if (result.error.empty()) {
      attempt(result.error, [&] {
        if (needs_it_here) {
          heap.reserve(place);
        }
      });
      group.begin();
      co_await share_error(group, result);
    }
  }
  if (result.error.empty()) {
    result.placement = place;
    result.data = heap.take(place);
  } else if (decision.is_refused == 0) {
    heap.give_up(place);
  }
}

}  // namespace pydist
