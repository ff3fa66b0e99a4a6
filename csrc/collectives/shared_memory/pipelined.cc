#include "collectives/shared_memory/pipelined.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "collectives/shared_memory/route.h"
#include "collectives/slices.h"

namespace pydist {
namespace {

// The largest block that any rank sends; what every rank knows from the posts.
std::uint64_t largest_block(const Group& group, const Call& call) {
  std::uint64_t largest = 0;
  for (int rank = 0; rank < group.size(); ++rank) {
    switch (call.kind) {
      case OpKind::kScatter:
        largest = std::max(largest, group.posted_count(call.root, rank));
        break;
      case OpKind::kGather:
        largest = std::max(largest, group.posted_count(rank, rank));
        break;
      case OpKind::kBroadcast:
        return call.count;
      default:
        for (int block = 0; block < group.size(); ++block) {
          largest = std::max(largest, group.posted_count(rank, block));
        }
        break;
    }
  }
  return largest;
}

}  // namespace

Task reduce_through_transit(Collective& run) {
  Group& group = run.group();
  const Call& call = run.call();
  const int me = run.me();
  const bool receives = call.kind == OpKind::kAllReduce || run.is_root();
  const std::size_t per_round = group.piece_bytes() / run.slot_element_bytes();
  const std::uint64_t rounds = (call.count + per_round - 1) / per_round;
  const std::uint64_t first = group.round();
  const bool others_receive = call.kind == OpKind::kAllReduce || !run.is_root();
  const std::byte* input = call.inputs[0].data;
  std::byte* output = receives ? call.outputs[0].data : nullptr;
  // Whose slot has the result of `reducer` for `receiver`. Of two ranks the receiver's: there lies
  // what the reducer has just read, so those lines are in its cache. See decision 11.
  const auto holder_of = [&](int reducer, int receiver) {
    return run.size() == 2 ? receiver : reducer;
  };
  const int next = (me + 1) % run.size();
  const auto begin_of = [&](std::uint64_t k) { return k * per_round; };
  const auto slices_of = [&](std::uint64_t k) {
    return Slices(std::min(per_round, call.count - begin_of(k)), run.size(),
                  run.slot_element_bytes());
  };

  for (std::uint64_t step = 0; step < rounds + 2; ++step) {
    if (step < rounds) {
      const std::uint64_t k = step;
      co_await group.may_deposit(first + k);
      std::byte* slot = group.transit(me, first + k);
      const Slices slices = slices_of(k);
      const Slice mine = slices[me];
      const std::size_t behind = mine.begin + mine.count;
      run.put(slot, input + run.bytes(begin_of(k)), mine.begin);
      run.put(slot + run.slot_bytes(behind), input + run.bytes(begin_of(k) + behind),
              slices.count() - behind);
      group.publish(&RankControl::deposited, first + k);
    }
    if (step >= 1 && step - 1 < rounds) {
      const std::uint64_t k = step - 1;
      co_await group.done_by_all(&RankControl::deposited, first + k);
      const Slice mine = slices_of(k)[me];
      const std::size_t offset = run.slot_bytes(mine.begin);
      const std::size_t here = run.bytes(begin_of(k) + mine.begin);
      run.reduce_pieces(
          [&](int rank) {
            return rank == me ? input + here : group.transit(rank, first + k) + offset;
          },
          others_receive ? group.transit(holder_of(me, next), first + k) + offset : nullptr,
          receives ? output + here : nullptr, mine.count);
      group.publish(&RankControl::reduced, first + k);
      if (!receives) {
        group.publish(&RankControl::consumed, first + k);
      }
    }
    if (step >= 2 && receives) {
      const std::uint64_t k = step - 2;
      co_await group.done_by_all(&RankControl::reduced, first + k);
      const Slices slices = slices_of(k);
      for (int turn = 1; turn < run.size(); ++turn) {
        // Each rank starts with another neighbour, so that not all read the same lines at once.
        const int rank = (me + turn) % run.size();
        const Slice slice = slices[rank];
        run.take(output + run.bytes(begin_of(k) + slice.begin),
                 group.transit(holder_of(rank, me), first + k) + run.slot_bytes(slice.begin),
                 slice.count);
      }
      group.publish(&RankControl::consumed, first + k);
    }
  }
  group.advance_rounds(rounds);
}

Task exchange_through_transit(Collective& run) {
  Group& group = run.group();
  const Call& call = run.call();
  const int me = run.me();
  const Blocks sent = contributed_blocks(group, call);
  // Blocks of receivers lie side by side in the slot.
  const bool has_lanes = is_personal(call.kind);
  const bool receives = call.kind == OpKind::kGather ? run.is_root()
                        : is_one_to_all(call.kind)   ? !run.is_root()
                                                     : true;
  const int lanes = has_lanes ? run.size() - 1 : 1;
  // Lanes begin where lines do, so that no line has two readers. There is a line for each rank, see
  // GroupSegment::least_chunk_bytes().
  const std::size_t room = group.piece_bytes() / static_cast<std::size_t>(lanes);
  const std::size_t per_round = room / kLineBytes * kLineBytes / run.slot_element_bytes();
  const std::size_t lane_bytes = run.slot_bytes(per_round);
  const std::uint64_t rounds = (largest_block(group, call) + per_round - 1) / per_round;
  const std::uint64_t first = group.round();
  // The part of a block that round k moves.
  const auto piece = [&](std::size_t count, std::uint64_t k) {
    const std::size_t begin = std::min(count, k * per_round);
    return Slice{begin, std::min(per_round, count - begin)};
  };

  // As in pack_contribution().
  const auto lane_of = [&](int sender, int receiver) {
    const int after = (receiver - sender - 1 + run.size()) % run.size();
    return has_lanes ? static_cast<std::size_t>(after) * lane_bytes : 0;
  };

  if (!receives && rounds != 0) {
    // Said at once: two senders of a gather would otherwise wait for each other to be through.
    group.publish(&RankControl::consumed, first + rounds - 1);
  }
  for (std::uint64_t step = 0; step < rounds + 1; ++step) {
    if (step < rounds && !sent.empty()) {
      const std::uint64_t k = step;
      co_await group.may_deposit(first + k);
      std::byte* slot = group.exchanged_transit(me, first + k);
      for (int turn = 1; turn <= lanes; ++turn) {
        const int rank = (me + turn) % run.size();
        const Block block = sent[has_lanes ? rank : 0];
        const Slice part = piece(block.count, k);
        run.put(slot + lane_of(me, rank), block.data + run.bytes(part.begin), part.count);
      }
      group.publish(&RankControl::deposited, first + k);
    }
    if (step >= 1 && receives) {
      const std::uint64_t k = step - 1;
      if (is_one_to_all(call.kind)) {
        co_await group.done_by(&RankControl::deposited, call.root, first + k);
      } else {
        co_await group.done_by_all(&RankControl::deposited, first + k);
      }
      const auto received = [&](int rank) -> const std::byte* {
        return group.exchanged_transit(rank, first + k) + lane_of(rank, me);
      };
      if (call.kind == OpKind::kReduceScatter) {
        const Slice part = piece(call.outputs[0].count, k);
        run.reduce_pieces(
            [&](int rank) {
              return rank == me ? call.inputs[me].data + run.bytes(part.begin) : received(rank);
            },
            nullptr, call.outputs[0].data + run.bytes(part.begin), part.count);
      } else if (is_one_to_all(call.kind)) {
        const Slice part = piece(call.outputs[0].count, k);
        run.copy(call.outputs[0].data + run.bytes(part.begin), received(call.root), part.count);
      } else {
        for (int turn = 1; turn < run.size(); ++turn) {
          const int rank = (me + turn) % run.size();
          const Slice part = piece(call.outputs[rank].count, k);
          run.copy(call.outputs[rank].data + run.bytes(part.begin), received(rank), part.count);
        }
      }
      group.publish(&RankControl::consumed, first + k);
    }
  }
  // One's own block never leaves the rank.
  switch (call.kind) {
    case OpKind::kAllGather:
    case OpKind::kGather:
      if (receives) {
        run.copy(call.outputs[me].data, call.inputs[0].data, call.inputs[0].count);
      }
      break;
    case OpKind::kAllToAll:
      run.copy(call.outputs[me].data, call.inputs[me].data, call.inputs[me].count);
      break;
    case OpKind::kBroadcast:
      if (run.is_root() && !call.outputs.empty()) {
        run.copy(call.outputs[0].data, call.inputs[0].data, call.count);
      }
      break;
    case OpKind::kScatter:
      if (run.is_root()) {
        run.copy(call.outputs[0].data, call.inputs[me].data, call.inputs[me].count);
      }
      break;
    default:
      break;
  }
  group.advance_rounds(rounds);
}

}  // namespace pydist
