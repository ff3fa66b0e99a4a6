#include "collectives/shared_memory/one_shot.h"

#include <cstddef>

namespace pydist {
namespace {

// Where `rank`'s contribution lies.
const std::byte* contribution(const Group& group, int rank) {
  const Post& post = group.post(rank);
  if ((post.flags & Post::kShared) != 0) {
    return group.window(rank)->address(group.detail(rank).input);
  }
  return (post.flags & Post::kInline) != 0 ? post.data()
                                           : group.exchanged_transit(rank, group.round());
}

// Elements in front of the block for `receiver` in `sender`'s contribution: its buffer, or what
// pack_contribution() has made of it.
std::size_t block_offset(const Group& group, int sender, int receiver) {
  const bool is_packed = (group.post(sender).flags & Post::kShared) == 0;
  const int first = is_packed ? sender + 1 : 0;
  const int before = (receiver - first + group.size()) % group.size();
  if ((group.post(sender).flags & Post::kRagged) == 0) {
    return static_cast<std::size_t>(before) * group.post(sender).count;
  }
  std::size_t offset = 0;
  for (int rank = first; rank < first + before; ++rank) {
    offset += group.posted_count(sender, rank % group.size());
  }
  return offset;
}

}  // namespace

void finish_from_contributions(Collective& run) {
  Group& group = run.group();
  const Call& call = run.call();
  const int me = run.me();
  const auto block_for_me = [&](int sender) {
    return contribution(group, sender) + run.slot_bytes(block_offset(group, sender, me));
  };
  switch (call.kind) {
    case OpKind::kAllReduce:
    case OpKind::kReduce:
      if (call.kind == OpKind::kAllReduce || run.is_root()) {
        run.reduce_pieces(
            [&](int rank) { return rank == me ? call.inputs[0].data : contribution(group, rank); },
            nullptr, call.outputs[0].data, call.count);
      }
      break;
    case OpKind::kReduceScatter:
      run.reduce_pieces(
          [&](int rank) { return rank == me ? call.inputs[me].data : block_for_me(rank); }, nullptr,
          call.outputs[0].data, call.outputs[0].count);
      break;
    case OpKind::kAllGather:
    case OpKind::kGather:
      if (call.kind == OpKind::kAllGather || run.is_root()) {
        for (int rank = 0; rank < run.size(); ++rank) {
          const Block block = call.outputs[rank];
          run.copy(block.data, rank == me ? call.inputs[0].data : contribution(group, rank),
                   block.count);
        }
      }
      break;
    case OpKind::kBroadcast:
      if (!call.outputs.empty()) {
        run.copy(call.outputs[0].data,
                 run.is_root() ? call.inputs[0].data : contribution(group, call.root), call.count);
      }
      break;
    case OpKind::kScatter:
      run.copy(call.outputs[0].data, run.is_root() ? call.inputs[me].data : block_for_me(call.root),
               call.outputs[0].count);
      break;
    case OpKind::kAllToAll:
      for (int rank = 0; rank < run.size(); ++rank) {
        const Block block = call.outputs[rank];
        run.copy(block.data, rank == me ? call.inputs[me].data : block_for_me(rank), block.count);
      }
      break;
    default:
      break;
  }
}

void finish_one_shot(Collective& run, Route route) {
  Group& group = run.group();
  finish_from_contributions(run);
  if (route == Route::kOneShot) {
    group.publish_quietly(&RankControl::consumed, group.round());
    group.advance_rounds(1);
  }
}

}  // namespace pydist
