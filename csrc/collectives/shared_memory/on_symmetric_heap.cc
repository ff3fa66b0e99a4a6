#include "collectives/shared_memory/on_symmetric_heap.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <vector>

#include "collectives/slices.h"
#include "collectives/streaming_hint.h"

namespace pydist {
namespace {

void throw_failure(const Group& group) {
  if (group.segment().failure().is_set()) {
    std::rethrow_exception(group.segment().failure().error());
  }
}

// Says for as long as it exists that this rank writes into the symmetric memory of others. Throws
// the group's failure: a rank that fails relies on it that nobody begins to write any more. The two
// sequentially consistent pairs, this rank's word and the failure's, make that sure: either this
// rank sees the failure, or whoever has set it sees the word.
class HeapWriting {
 public:
  explicit HeapWriting(const Group& group)
      : word_(group.segment().control(group.rank()).writes_heap) {
    word_.store(1);
    try {
      throw_failure(group);
    } catch (...) {
      word_.store(0, std::memory_order_release);
      throw;
    }
  }
  HeapWriting(const HeapWriting&) = delete;
  HeapWriting& operator=(const HeapWriting&) = delete;
  ~HeapWriting() { word_.store(0, std::memory_order_release); }

 private:
  std::atomic<std::uint32_t>& word_;
};

}  // namespace

Task run_on_symmetric_heap(Collective& run) {
  Group& group = run.group();
  const Call& call = run.call();
  const int me = run.me();
  const SymmetricHeap& heap = group.heap();
  const std::uint64_t round = group.round();
  const StoreHint hint = hint_for(run.bytes(call.count));
  const auto input_of = [&](int rank) { return heap.address(rank, group.detail(rank).input); };
  const auto output_of = [&](int rank) { return heap.address(rank, group.detail(rank).output); };

  std::optional<HeapWriting> writing(std::in_place, group);
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
  writing.reset();
  // A rank that has raised has its memory to itself again, and may write there what is no input. It
  // sets the failure before it raises: as long as that is not set, what was read is right. The
  // fence keeps the reads before this look at it.
  std::atomic_thread_fence(std::memory_order_acquire);
  throw_failure(group);
  group.publish(&RankControl::consumed, round);
  // Peers write into this rank's buffers, or read them, until they are done.
  if (call.kind != OpKind::kBroadcast || run.is_root()) {
    co_await group.done_by_all(&RankControl::consumed, round);
  }
  group.advance_rounds(1);
}

}  // namespace pydist
