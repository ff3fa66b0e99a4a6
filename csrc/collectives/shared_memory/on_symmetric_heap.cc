#include "collectives/shared_memory/on_symmetric_heap.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "collectives/heap_access.h"
#include "collectives/slices.h"

namespace pydist {

namespace {

// What this rank has to move, between its own memory and that of others.
void move(Collective& run) {
  const Group& group = run.group();
  const Call& call = run.call();
  const int me = run.me();
  const SymmetricHeap& heap = group.heap();
  const StoreHint hint = run.hint_for(run.bytes(call.count));
  const auto input_of = [&](int rank) { return heap.address(rank, group.detail(rank).input); };
  const auto output_of = [&](int rank) { return heap.address(rank, group.detail(rank).output); };

  switch (call.kind) {
    case OpKind::kAllReduce: {
      // The owner of a slice reads it from everybody and writes it to everybody.
      const Slice mine = Slices(call.count, run.size(), run.element_bytes())[me];
      std::vector<void*> targets;
      for (int rank = 0; rank < run.size(); ++rank) {
        targets.push_back(output_of(rank) + run.bytes(mine.begin));
      }
      run.reduce_buffers([&](int rank) { return input_of(rank) + run.bytes(mine.begin); }, targets,
                         mine.count, hint);
      break;
    }
    case OpKind::kReduceScatter: {
      // Ragged blocks lie in one buffer only when they are equal, so the offset is the same in all.
      const std::size_t count = call.outputs[0].count;
      void* target = call.outputs[0].data;
      run.reduce_buffers(
          [&](int rank) {
            return input_of(rank) + run.bytes(static_cast<std::size_t>(me) * count);
          },
          {&target, 1}, count, hint);
      break;
    }
    case OpKind::kAllGather: {
      const std::size_t count = call.inputs[0].count;
      for (int turn = 0; turn < run.size(); ++turn) {
        const int rank = (me + turn) % run.size();
        run.copy(output_of(rank) + run.bytes(static_cast<std::size_t>(me) * count),
                 call.inputs[0].data, count);
      }
      break;
    }
    case OpKind::kBroadcast:
      if (!call.outputs.empty()) {
        run.copy(call.outputs[0].data, input_of(call.root), call.count);
      }
      break;
    default:
      break;
  }
}

// The first rank that has left, of those whose memory this one reads or writes; -1 if none has.
int who_has_left(const Collective& run) noexcept {
  const bool reads_root_alone = run.call().kind == OpKind::kBroadcast;
  for (int rank = 0; rank < run.size(); ++rank) {
    if ((!reads_root_alone || rank == run.call().root) && has_left(run.group(), rank)) {
      return rank;
    }
  }
  return -1;
}

}  // namespace

Task run_on_symmetric_heap(Collective& run) {
  Group& group = run.group();
  const std::uint64_t round = group.round();
  std::optional<HeapWriting> writing(std::in_place, group);
  int left = who_has_left(run);
  if (left < 0) {
    move(run);
  }
  writing.reset();
  require_right_reads(group);
  left = left < 0 ? who_has_left(run) : left;
  if (left >= 0) {
    co_await until_back(group, left);
  }
  group.publish(&RankControl::consumed, round);
  // Peers write into this rank's buffers, or read them, until they are done.
  if (run.call().kind != OpKind::kBroadcast || run.is_root()) {
    co_await group.done_by_all(&RankControl::consumed, round);
  }
  group.advance_rounds(1);
}

}  // namespace pydist
