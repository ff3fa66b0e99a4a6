#include "collectives/shared_memory/in_place.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/heap_access.h"
#include "collectives/shared_memory/one_shot.h"
#include "collectives/shared_memory/route.h"
#include "collectives/slices.h"

namespace pydist {
namespace {

// Of one rank's slice of a piece: what it has reduced is still in its cache when others copy it.
constexpr std::size_t kSliceBytes = std::size_t{256} << 10;

bool is_read(const Group& group, int rank) noexcept {
  return is_read_in_place(group.post(rank).offer());
}

// Elements of a piece, of all ranks' slices together.
std::size_t piece_of(const Collective& run) noexcept {
  return kSliceBytes / run.element_bytes() * static_cast<std::size_t>(run.size());
}

Task reduce_by_slices(Collective& run, std::uint64_t rounds) {
  Group& group = run.group();
  const Call& call = run.call();
  const int me = run.me();
  const std::size_t per_round = piece_of(run);
  const std::uint64_t first = group.round();
  // What has been looked at is what is used: a peer may damage its post meanwhile.
  std::vector<const std::byte*> inputs;
  std::vector<const std::byte*> outputs;
  for (int rank = 0; rank < run.size(); ++rank) {
    inputs.push_back(group.window(rank)->address(group.detail(rank).input));
    outputs.push_back(group.window(rank)->address(group.detail(rank).output));
  }
  std::byte* const output = call.outputs[0].data;
  // Of round k.
  const auto slice_of = [&](std::uint64_t k, int rank) {
    const std::size_t begin = k * per_round;
    Slice slice =
        Slices(std::min(per_round, call.count - begin), run.size(), run.element_bytes())[rank];
    slice.begin += begin;
    return slice;
  };

  for (std::uint64_t step = 0; step < rounds + 1; ++step) {
    if (step < rounds) {
      const Slice mine = slice_of(step, me);
      const std::size_t offset = run.bytes(mine.begin);
      void* target = output + offset;
      // Past no cache, whatever the size: the others read it next.
      run.reduce_buffers([&](int rank) { return inputs[static_cast<std::size_t>(rank)] + offset; },
                         {&target, 1}, mine.count, StoreHint::kCached);
      group.publish(&RankControl::reduced, first + step);
    }
    if (step >= 1) {
      const std::uint64_t k = step - 1;
      co_await group.done_by_all(&RankControl::reduced, first + k);
      for (int turn = 1; turn < run.size(); ++turn) {
        // Each rank starts with another neighbour, so that not all read the same lines at once.
        const int rank = (me + turn) % run.size();
        const Slice slice = slice_of(k, rank);
        const std::size_t offset = run.bytes(slice.begin);
        run.copy(output + offset, outputs[static_cast<std::size_t>(rank)] + offset, slice.count);
      }
    }
  }
}

// The first rank that has left, of those whose memory this one has read; -1 if none has.
int who_was_read_and_has_left(const Collective& run) noexcept {
  const Call& call = run.call();
  if (call.kind == OpKind::kGather && !run.is_root()) {
    return -1;
  }
  for (int rank = 0; rank < run.size(); ++rank) {
    const bool contributes = !is_one_to_all(call.kind) || rank == call.root;
    if (contributes && is_read(run.group(), rank) && has_left(run.group(), rank)) {
      return rank;
    }
  }
  return -1;
}

}  // namespace

Task run_in_place(Collective& run) {
  Group& group = run.group();
  const Call& call = run.call();
  const bool goes_by_slices = call.kind == OpKind::kAllReduce;
  const std::size_t per_round = piece_of(run);
  const std::uint64_t rounds = goes_by_slices ? (call.count + per_round - 1) / per_round : 1;
  const std::uint64_t behind = group.round() + rounds;
  int gone = -1;
  if (goes_by_slices) {
    co_await reduce_by_slices(run, rounds);
  } else {
    gone = finish_from_contributions(run);
  }
  require_right_reads(group);
  // See Note [Leaving amid an operation]. Who leaves amid this one, or has ended, never says what
  // is waited for.
  if (gone < 0) {
    gone = who_was_read_and_has_left(run);
  }
  if (gone >= 0) {
    co_await group.done_by(&RankControl::consumed, gone, behind);
  }
  group.publish(&RankControl::consumed, behind - 1);
  // Others read this rank's buffers until they are done.
  if (is_read(group, run.me())) {
    if (call.kind == OpKind::kGather) {
      co_await group.done_by(&RankControl::consumed, call.root, behind - 1);
    } else {
      co_await group.done_by_all(&RankControl::consumed, behind - 1);
    }
  }
  group.advance_rounds(rounds);
}

}  // namespace pydist
