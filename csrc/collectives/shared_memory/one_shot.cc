#include "collectives/shared_memory/one_shot.h"

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>

#include "base/deadline.h"
#include "base/error.h"
#include "collectives/heap_access.h"

namespace pydist {
namespace {

// Where `rank`'s contribution lies.
const std::byte* contribution(const Group& group, int rank) {
  const Post& post = group.post(rank);
  if (post.offer() == Offer::kShared) {
    return group.window(rank)->address(group.detail(rank).input);
  }
  return is_inline(post.offer()) ? post.data() : group.exchanged_transit(rank, group.round());
}

// Elements in front of the block for `receiver` in `sender`'s contribution: its buffer, or what
// pack_contribution() has made of it.
std::size_t block_offset(const Group& group, int sender, int receiver) {
  const bool is_packed = !is_read_in_place(group.post(sender).offer());
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

[[noreturn]] void throw_refused(const Group& group, int sender, int error) {
  const char* const why = std::strerror(error);
  throw TransportError(
      join("rank ", group.rank(), " can't read the tensor of rank ", sender,
           " through the kernel: ", why,
           ". Either its memory has been freed amid the collective, or the system does not let it "
           "be read any more; PYDIST_SINGLE_COPY=off moves data without that."),
      Blame{.ranks = {sender}, .cause = join("its memory can't be read: ", why)});
}

// Whether a rank whose memory can't be read has ended, or left. One that is being killed loses its
// memory before the kernel tells that it has ended, so this looks for a while. Throws the group's
// failure: who has raised may have freed what was to be read.
bool is_gone(const Group& group, int rank) {
  constexpr std::chrono::milliseconds kDying{500};
  for (const Deadline deadline = Deadline::in(kDying);;) {
    throw_failure(group);
    if (has_left(group, rank) || group.process(rank).obstacle() == ESRCH) {
      return true;
    }
    if (deadline.has_passed()) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

// Copies elements of what `sender` contributes, from `offset` elements on. False where its process
// has ended, or does not take part any more.
bool fetch(const Collective& run, int sender, std::size_t offset, std::byte* target,
           std::size_t count) {
  const Group& group = run.group();
  if (group.post(sender).offer() != Offer::kInItsProcess) {
    run.copy(target, contribution(group, sender) + run.slot_bytes(offset), count);
    return true;
  }
  const std::uint64_t address = group.detail(sender).input + run.bytes(offset);
  const int error = count == 0 ? 0 : group.process(sender).read(target, address, run.bytes(count));
  if (error == 0) {
    return true;
  }
  if (!is_gone(group, sender)) {
    throw_refused(group, sender, error);
  }
  return false;
}

}  // namespace

int finish_from_contributions(Collective& run) {
  Group& group = run.group();
  const Call& call = run.call();
  const int me = run.me();
  int gone = -1;
  const auto block_for_me = [&](int sender) {
    return contribution(group, sender) + run.slot_bytes(block_offset(group, sender, me));
  };
  // `offset_of(sender)`: where its block for this rank begins, in elements. Each rank starts with
  // another neighbour, so that not all read the same lines at once.
  const auto fetch_from_others = [&](auto offset_of) {
    for (int turn = 1; turn < run.size() && gone < 0; ++turn) {
      const int sender = (me + turn) % run.size();
      const Block block = call.outputs[sender];
      if (!fetch(run, sender, offset_of(sender), block.data, block.count)) {
        gone = sender;
      }
    }
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
        const Block own = call.outputs[me];
        run.copy(own.data, call.inputs[0].data, own.count);
        fetch_from_others([](int) { return std::size_t{0}; });
      }
      break;
    case OpKind::kAllToAll: {
      const Block own = call.outputs[me];
      run.copy(own.data, call.inputs[me].data, own.count);
      fetch_from_others([&](int sender) { return block_offset(group, sender, me); });
      break;
    }
    case OpKind::kBroadcast:
    case OpKind::kScatter: {
      if (call.outputs.empty()) {
        break;
      }
      const bool has_blocks = call.kind == OpKind::kScatter;
      const Block output = call.outputs[0];
      if (run.is_root()) {
        run.copy(output.data, call.inputs[has_blocks ? me : 0].data, output.count);
      } else if (!fetch(run, call.root, has_blocks ? block_offset(group, call.root, me) : 0,
                        output.data, output.count)) {
        gone = call.root;
      }
      break;
    }
    default:
      break;
  }
  return gone;
}

void finish_one_shot(Collective& run, Route route) {
  Group& group = run.group();
  static_cast<void>(finish_from_contributions(run));
  if (route == Route::kOneShot) {
    group.publish_quietly(&RankControl::consumed, group.round());
    group.advance_rounds(1);
  }
}

}  // namespace pydist
