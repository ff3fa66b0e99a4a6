#include "collectives/call_mismatch.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string>

#include "base/error.h"
#include "collectives/shared_memory/route.h"

namespace pydist {
namespace {

std::string call_text(const Post& post) {
  if (post.kind == OpKind::kBarrier) {
    return "barrier";
  }
  if (post.kind == OpKind::kAllocate) {
    return join("allocate(", post.count, " bytes of symmetric memory)");
  }
  std::string text =
      join(to_string(post.kind), "(", to_string(post.dtype),
           post.wire_dtype == post.dtype ? "" : join(" travelling as ", to_string(post.wire_dtype)),
           ", ", post.count,
           (post.flags & Post::kRagged) != 0 ? " elements in uneven blocks" : " elements");
  if (has_op(post.kind)) {
    text += join(", ", to_string(post.op));
  }
  if (has_root(post.kind)) {
    text += join(", root ", post.root());
  }
  return text + ")";
}

[[noreturn]] void throw_mismatch(const Group& group, int peer, const std::string& detail) {
  throw Mismatch(
      join("Ranks disagree about collective #", group.sequence(), " of their group: rank ",
           group.rank(), " called ",
           call_text(group.segment().control(group.rank()).posts[group.sequence() % kPostDepth]),
           ", but rank ", peer, " called ", call_text(group.post(peer)), detail,
           ". Every rank of a group must call the same collectives in the same order "
           "with matching arguments."),
      Blame{.ranks = {std::min(group.rank(), peer), std::max(group.rank(), peer)},
            .operation = join(to_string(group.post(group.rank()).kind), " #", group.sequence()),
            .cause = "ranks called different collectives"});
}

// Compares what this rank and `peer` know of the sizes of the blocks that they exchange.
void check_blocks(const Group& group, const Call& call, int peer) {
  const int me = group.rank();
  const auto expect = [&](const char* what, std::uint64_t theirs, std::uint64_t mine) {
    if (theirs != mine) {
      throw_mismatch(group, peer,
                     join("; ", what, " has ", theirs, " elements for rank ", peer, " and ", mine,
                          " for rank ", me));
    }
  };
  const auto expect_block = [&](int rank, const Block& mine) {
    expect(join("the block of rank ", rank).c_str(), group.posted_count(peer, rank), mine.count);
  };
  switch (call.kind) {
    case OpKind::kReduceScatter:
    case OpKind::kAllGather:
      for (int rank = 0; rank < group.size(); ++rank) {
        const bool gathers = call.kind == OpKind::kAllGather;
        expect_block(rank, gathers ? call.outputs[rank] : call.inputs[rank]);
      }
      break;
    case OpKind::kGather:
    case OpKind::kScatter: {
      // Only the root knows all blocks; everybody else posts its own alone.
      const bool gathers = call.kind == OpKind::kGather;
      if (me == call.root) {
        expect_block(peer, gathers ? call.outputs[peer] : call.inputs[peer]);
      } else if (peer == call.root) {
        expect_block(me, gathers ? call.inputs[0] : call.outputs[0]);
      }
      break;
    }
    case OpKind::kAllToAll:
      expect(join("the block from rank ", peer, " to rank ", me).c_str(),
             group.posted_count(peer, me), call.outputs[peer].count);
      break;
    default:
      expect("the buffer", group.post(peer).count, call.count);
      break;
  }
}

// More elements than any buffer has.
constexpr std::uint64_t kMostElementsOfABuffer = std::uint64_t{1} << 48;

// Elements of all blocks that `peer` sends, by what it has posted.
std::uint64_t posted_total(const Group& group, const Call& call, int peer) {
  switch (call.kind) {
    case OpKind::kAllReduce:
      return group.post(peer).count;
    case OpKind::kReduce:
      return peer == call.root ? 0 : group.post(peer).count;
    case OpKind::kBroadcast:
      return peer == call.root ? group.post(peer).count : 0;
    case OpKind::kAllGather:
      return group.posted_count(peer, peer);
    case OpKind::kGather:
      return peer == call.root ? 0 : group.posted_count(peer, peer);
    case OpKind::kReduceScatter:
    case OpKind::kAllToAll:
    case OpKind::kScatter: {
      std::uint64_t total = 0;
      for (int rank = 0; rank < group.size(); ++rank) {
        const bool is_sent = call.kind != OpKind::kScatter || peer == call.root;
        total += is_sent ? std::min(group.posted_count(peer, rank), kMostElementsOfABuffer) : 0;
      }
      return total;
    }
    default:
      return 0;
  }
}

// What a post says of where its data lies must make sense: it is read there without another look.
// No rank writes anything else, unless its memory is damaged.
void check_way(const Group& group, const Call& call, int peer) {
  const Post& post = group.post(peer);
  const std::uint64_t total = posted_total(group, call, peer);
  const std::uint64_t bytes =
      std::min(total, kMostElementsOfABuffer) * element_size(call.wire_dtype);
  bool makes_sense = total < kMostElementsOfABuffer;
  const PostDetail& detail = group.detail(peer);
  switch (post.offer()) {
    case Offer::kInPieces:
    case Offer::kOnHostHeap:  // see buffers_on_heap()
      break;
    case Offer::kInFirstLine:
      makes_sense &= bytes <= kFirstLineBytes;
      break;
    case Offer::kInLines:
      makes_sense &= bytes <= kInlineBytes;
      break;
    case Offer::kEager:
      makes_sense &= bytes <= group.chunk_bytes();
      // What a rank gives to itself alone is not sent.
      if (group.announcer() != nullptr) {
        const std::uint64_t own = is_personal(call.kind) ? group.posted_count(peer, peer) : 0;
        makes_sense &= detail.eager_bytes == bytes - own * element_size(call.wire_dtype);
      }
      break;
    case Offer::kSymmetric: {
      // An all_gather is gathered where all blocks lie.
      const std::uint64_t span =
          call.kind == OpKind::kAllGather ? call.outputs.total() * element_size(call.dtype) : bytes;
      // What does not send posts no places in a broadcast, and nobody asks for them.
      const bool is_read = call.kind != OpKind::kBroadcast || peer == call.root;
      makes_sense &= !is_read || (group.heap().has(detail.input, span) &&
                                  group.heap().has(detail.output, span));
      break;
    }
    case Offer::kShared: {
      const HeapWindow* const window = group.window(peer);
      makes_sense &= window != nullptr && window->has(detail.input, bytes) &&
                     (call.kind != OpKind::kAllReduce || window->has(detail.output, bytes));
      break;
    }
    case Offer::kInItsProcess:
      // Where it is no address of that process, the kernel says so.
      makes_sense &= group.reads_processes() && !has_op(call.kind);
      break;
  }
  if (!makes_sense) {
    throw_damaged(group, peer);
  }
}

// The blocks that this rank posts the sizes of; none where it posts one count.
const Blocks* posted_blocks(const Call& call, int rank) {
  switch (call.kind) {
    case OpKind::kReduceScatter:
    case OpKind::kAllToAll:
      return &call.inputs;
    case OpKind::kAllGather:
      return &call.outputs;
    case OpKind::kGather:
      return rank == call.root ? &call.outputs : nullptr;
    case OpKind::kScatter:
      return rank == call.root ? &call.inputs : nullptr;
    default:
      return nullptr;
  }
}

}  // namespace

void throw_damaged(const Group& group, int peer) {
  const Post& post = group.post(peer);
  throw Error(
      ErrorKind::kError,
      join("What rank ", peer, " has posted of collective #", group.sequence(),
           " of its group makes no sense (", call_text(post), ", flags ",
           static_cast<int>(post.flags),
           "): its shared memory has been damaged. Look for writes out of bounds in that process."),
      Blame{.ranks = {peer}, .cause = "its shared memory is damaged"});
}

void describe_call(Group& group, const Call& call, std::uint8_t flags) {
  if (call.op == ReduceOp::kPremulSum) {
    group.my_detail().factor = call.factor;
  }
  const Blocks* blocks = posted_blocks(call, group.rank());
  if (blocks != nullptr && blocks->is_ragged()) {
    flags |= Post::kRagged;
    std::uint64_t* counts = group.my_block_counts();
    for (int rank = 0; rank < group.size(); ++rank) {
      counts[rank] = (*blocks)[rank].count;
    }
  }
  Post& post = group.my_post();
  post.kind = call.kind;
  post.op = call.op;
  post.dtype = call.dtype;
  post.wire_dtype = call.wire_dtype;
  post.flags = flags;
  post.set_root(call.root);
  post.count = call.count;
}

bool all_posts_are_alike(const Group& group) noexcept {
  const auto head_of = [](const Post& post) {
    std::array<std::uint64_t, 2> words{};
    static_assert(offsetof(Post, first_line) - offsetof(Post, kind) == sizeof words);
    std::memcpy(words.data(), &post.kind, sizeof words);
    return words;
  };
  const auto mine = head_of(group.post(group.rank()));
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank != group.rank() && head_of(group.post(rank)) != mine) {
      return false;
    }
  }
  return true;
}

void check_agreement(const Group& group, const Call& call, int first, int last) {
  for (int peer = first; peer < last; ++peer) {
    if (peer == group.rank()) {
      continue;
    }
    const Post& theirs = group.post(peer);
    const bool same_call = theirs.kind == call.kind && theirs.dtype == call.dtype &&
                           theirs.wire_dtype == call.wire_dtype &&
                           (!has_op(call.kind) || theirs.op == call.op) &&
                           (!has_root(call.kind) || theirs.root() == call.root);
    if (!same_call) {
      throw_mismatch(group, peer, "");
    }
    // Equal blocks everywhere are the common case, and one comparison.
    const bool is_ragged = ((theirs.flags | group.post(group.rank()).flags) & Post::kRagged) != 0;
    // In an all_to_all a rank posts only the sizes that it sends, not those that it expects.
    const bool expects_other = call.kind == OpKind::kAllToAll &&
                               group.posted_count(peer, group.rank()) != call.outputs[peer].count;
    if (is_ragged || expects_other || theirs.count != call.count) {
      check_blocks(group, call, peer);
    }
    check_way(group, call, peer);
  }
}

}  // namespace pydist
