// The file is long because its three ways share the steps of a Collective, and one choice between
// them.

#include "collectives/shared_memory.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <vector>

#include "collectives/call_mismatch.h"
#include "collectives/route.h"
#include "collectives/slices.h"
#include "collectives/streaming_hint.h"
#include "collectives/wire.h"
#include "kernels/cpu/reduce.h"

namespace pydist {
namespace {

// Everything that the steps of one collective share.
class Collective {
 public:
  Collective(Group& group, const Call& call)
      : group_(group),
        call_(call),
        me_(group.rank()),
        size_(group.size()),
        element_bytes_(element_size(call.dtype)),
        wire_(call.dtype, call.wire_dtype) {}

  [[nodiscard]] Group& group() const noexcept { return group_; }
  [[nodiscard]] const Call& call() const noexcept { return call_; }
  [[nodiscard]] int me() const noexcept { return me_; }
  [[nodiscard]] int size() const noexcept { return size_; }
  [[nodiscard]] bool is_root() const noexcept { return me_ == call_.root; }
  // Bytes of an element in a buffer, and in posts and slots. They differ only where
  // call().wire_dtype says so, which reductions alone may have.
  [[nodiscard]] std::size_t element_bytes() const noexcept { return element_bytes_; }
  [[nodiscard]] std::size_t slot_element_bytes() const noexcept { return wire_.bytes(1); }
  [[nodiscard]] const Wire& wire() const noexcept { return wire_; }

  // Bytes of `elements`, for offsets.
  [[nodiscard]] std::size_t bytes(std::size_t elements) const noexcept {
    return elements * element_bytes_;
  }
  [[nodiscard]] std::size_t slot_bytes(std::size_t elements) const noexcept {
    return wire_.bytes(elements);
  }

  // Combines one piece of every rank's input in rank order; `source(rank)` is where it lies: this
  // rank's in its buffer, the others' as they travelled. The result goes into a slot, a buffer, or
  // both; the other is null.
  template <typename Source>
  void reduce_pieces(Source source, std::byte* slot, std::byte* output, std::size_t count) {
    if (count != 0) {
      wire_.combine(reduction(), gather_sources(source), static_cast<std::size_t>(me_), slot,
                    output, count);
    }
  }

  // The same where all pieces and targets are buffers.
  template <typename Source>
  void reduce_buffers(Source source, std::span<void* const> targets, std::size_t count,
                      StoreHint hint) {
    if (count != 0) {
      reduce(reduction(), gather_sources(source), targets, count, hint);
    }
  }

  void put(std::byte* slot, const std::byte* source, std::size_t elements) const {
    wire_.put(slot, source, elements);
  }

  void take(std::byte* target, const std::byte* slot, std::size_t elements) const {
    wire_.take(target, slot, elements, hint_for(bytes(call_.count)));
  }

  // Between buffers, or to one from what travelled as it is.
  void copy(std::byte* target, const std::byte* source, std::size_t elements) const {
    if (target != source && elements != 0) {
      copy_bytes(target, source, bytes(elements), hint_for(bytes(call_.count)));
    }
  }

 private:
  template <typename Source>
  std::span<const void*> gather_sources(Source source) {
    const auto size = static_cast<std::size_t>(size_);
    const void** sources = few_sources_.data();
    if (size > few_sources_.size()) {
      sources_.resize(size);
      sources = sources_.data();
    }
    for (int rank = 0; rank < size_; ++rank) {
      sources[rank] = source(rank);
    }
    return {sources, size};
  }

  Reduction reduction() { return {wire_.dtype(), call_.op, static_cast<double>(size_), factors()}; }

  // All ranks' factors for premul_sum; they travel with the posts.
  std::span<const double> factors() {
    if (call_.op != ReduceOp::kPremulSum) {
      return {};
    }
    if (factors_.empty()) {
      for (int rank = 0; rank < size_; ++rank) {
        factors_.push_back(group_.detail(rank).factor);
      }
    }
    return factors_;
  }

  Group& group_;
  const Call& call_;
  const int me_;
  const int size_;
  const std::size_t element_bytes_;
  const Wire wire_;
  std::array<const void*, 4> few_sources_;
  std::vector<const void*> sources_;  // of more ranks
  std::vector<double> factors_;
};

// -- one shot -------------------------------------------------------------------------------------

// Where `rank`'s contribution lies.
const std::byte* contribution(const Group& group, int rank) {
  const Post& post = group.post(rank);
  return (post.flags & Post::kInline) != 0 ? post.data() : group.transit(rank, group.round());
}

// Elements in front of the block for `receiver` in `sender`'s contribution.
std::size_t block_offset(const Group& group, int sender, int receiver) {
  if ((group.post(sender).flags & Post::kRagged) == 0) {
    return static_cast<std::size_t>(receiver) * group.post(sender).count;
  }
  std::size_t offset = 0;
  for (int rank = 0; rank < receiver; ++rank) {
    offset += group.posted_count(sender, rank);
  }
  return offset;
}

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

// -- pipelined ------------------------------------------------------------------------------------

// all_reduce and reduce: three chunks in flight. Slot layout: the chunk as it is, in which the
// place of one's own slice, which nobody else needs, takes the reduced slice.
Task reduce_through_transit(Collective& run) {
  Group& group = run.group();
  const Call& call = run.call();
  const int me = run.me();
  const bool receives = call.kind == OpKind::kAllReduce || run.is_root();
  const std::size_t per_round = group.chunk_bytes() / run.slot_element_bytes();
  const std::uint64_t rounds = (call.count + per_round - 1) / per_round;
  const std::uint64_t first = group.round();
  const std::byte* input = call.inputs[0].data;
  std::byte* output = receives ? call.outputs[0].data : nullptr;
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
          group.transit(me, first + k) + offset, receives ? output + here : nullptr, mine.count);
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
                 group.transit(rank, first + k) + run.slot_bytes(slice.begin), slice.count);
      }
      group.publish(&RankControl::consumed, first + k);
    }
  }
  group.advance_rounds(rounds);
}

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

// Everything but all_reduce and reduce: a round takes one piece of each block into the sender's
// slot and out of it again. Two rounds in flight.
Task exchange_through_transit(Collective& run) {
  Group& group = run.group();
  const Call& call = run.call();
  const int me = run.me();
  const Blocks sent = contributed_blocks(group, call);
  // Kinds in which every receiver gets a block of its own lay them side by side in the slot.
  const bool is_personal = call.kind == OpKind::kReduceScatter || call.kind == OpKind::kScatter ||
                           call.kind == OpKind::kAllToAll;
  const bool receives = call.kind == OpKind::kGather ? run.is_root()
                        : is_one_to_all(call.kind)   ? !run.is_root()
                                                     : true;
  const std::size_t lanes = is_personal ? static_cast<std::size_t>(run.size()) : 1;
  const std::size_t per_round = group.chunk_bytes() / lanes / run.slot_element_bytes();
  const std::size_t lane_bytes = run.slot_bytes(per_round);
  const std::uint64_t rounds = (largest_block(group, call) + per_round - 1) / per_round;
  const std::uint64_t first = group.round();
  // The part of a block that round k moves.
  const auto piece = [&](std::size_t count, std::uint64_t k) {
    const std::size_t begin = std::min(count, k * per_round);
    return Slice{begin, std::min(per_round, count - begin)};
  };

  if (!receives && rounds != 0) {
    // Said at once: two senders of a gather would otherwise wait for each other to be through.
    group.publish(&RankControl::consumed, first + rounds - 1);
  }
  for (std::uint64_t step = 0; step < rounds + 1; ++step) {
    if (step < rounds && !sent.empty()) {
      const std::uint64_t k = step;
      co_await group.may_deposit(first + k);
      std::byte* slot = group.transit(me, first + k);
      for (int rank = 0; rank < static_cast<int>(lanes); ++rank) {
        if (is_personal && rank == me) {
          continue;
        }
        const Block block = sent[rank];
        const Slice part = piece(block.count, k);
        run.put(slot + static_cast<std::size_t>(rank) * lane_bytes,
                block.data + run.bytes(part.begin), part.count);
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
        return group.transit(rank, first + k) +
               (is_personal ? static_cast<std::size_t>(me) * lane_bytes : 0);
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

// -- symmetric ------------------------------------------------------------------------------------

// Says for as long as it exists that this rank writes into the symmetric memory of others. Throws
// the group's failure: a rank that fails relies on it that nobody begins to write any more. The two
// sequentially consistent pairs, this rank's word and the failure's, make that sure: either this
// rank sees the failure, or whoever has set it sees the word.
class HeapWriting {
 public:
  explicit HeapWriting(const Group& group)
      : word_(group.segment().control(group.rank()).writes_heap) {
    word_.store(1);
    if (group.segment().failure().is_set()) {
      word_.store(0, std::memory_order_release);
      std::rethrow_exception(group.segment().failure().error());
    }
  }
  HeapWriting(const HeapWriting&) = delete;
  HeapWriting& operator=(const HeapWriting&) = delete;
  ~HeapWriting() { word_.store(0, std::memory_order_release); }

 private:
  std::atomic<std::uint32_t>& word_;
};

// Takes one round: it begins when all have posted, and ends when all have done their part.
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
  group.publish(&RankControl::consumed, round);
  // Peers write into this rank's buffers, or read them, until they are done.
  if (call.kind != OpKind::kBroadcast || run.is_root()) {
    co_await group.done_by_all(&RankControl::consumed, round);
  }
  group.advance_rounds(1);
}

// -- beginning and end ----------------------------------------------------------------------------

// How often this rank looks at the others' posts before its first pause. A rank that enters
// together with this one has posted by then.
constexpr unsigned kLooksInARow = 16;

// Fills in this rank's post, and the slot if its data goes there. Precondition: both may be
// written.
//
// Note [One line at once]: peers that are early look at the line of this rank's next post all the
// time, and each look takes it away from this core. So the stores to it come last and close
// together, or the line travels several times.
void fill_post(Group& group, const Call& call, std::uint8_t offer) {
  if ((offer & Post::kSymmetric) != 0) {
    const PostDetail places = symmetric_detail(group, call);
    group.my_detail().input = places.input;
    group.my_detail().output = places.output;
  }
  if (group.size() > 1 && (offer & (Post::kInline | Post::kEager)) != 0) {
    const Wire wire(call.dtype, call.wire_dtype);
    if ((offer & Post::kEager) != 0) {
      group.prepare_transit();
    }
    pack_blocks(contributed_blocks(group, call), group.size(), wire,
                (offer & Post::kEager) != 0 ? group.transit(group.rank(), group.round())
                                            : group.my_post().data(offer));
  }
  describe_call(group, call, offer);
}

// A root has nothing to learn from the others: it writes and goes.
bool waits_for_posts(const Group& group, const Call& call) noexcept {
  return !is_one_to_all(call.kind) || group.rank() != call.root;
}

// Precondition: posted_by_all() holds, if waits_for_posts().
Route agree(Group& group, const Call& call) {
  if (waits_for_posts(group, call)) {
    group.note_all_posted();
    // The common case, in which two words of each rank's post decide.
    if (call.kind == OpKind::kAllReduce && (group.post(group.rank()).flags & Post::kInline) != 0 &&
        all_posts_are_alike(group)) {
      return Route::kInline;
    }
    check_agreement(group, call, 0, group.size());
  }
  return agreed_route(group, call);
}

// Route::kInline and Route::kOneShot.
void finish_ahead(Collective& run, Route route) {
  Group& group = run.group();
  finish_from_contributions(run);
  if (route == Route::kOneShot) {
    group.publish_quietly(&RankControl::consumed, group.round());
    group.advance_rounds(1);
  }
}

}  // namespace

AtOnce::AtOnce(Group& group, const Call& call) noexcept
    : group_(group), call_(call), offer_(offered_route(group, call)) {}

bool AtOnce::may_post() const noexcept {
  return group_.next_may_post() && ((offer_ & Post::kInline) != 0 ||
                                    ((offer_ & Post::kEager) != 0 && group_.next_may_deposit()));
}

void AtOnce::post() {
  fill_post(group_, call_, offer_);
  // A fence at once would only wait until the post is out.
  group_.publish_post_quietly();
}

bool AtOnce::try_finish(unsigned looks) {
  if (waits_for_posts(group_, call_)) {
    Condition all_have_posted = group_.posted_by_all();
    for (unsigned look = 1; !all_have_posted.holds(); ++look) {
      if (look >= looks) {
        group_.notify();
        return false;
      }
      if (look == kLooksInARow) {
        // Somebody is late; those who sleep may be waiting for this rank.
        group_.notify();
      } else if (look > kLooksInARow) {
        spin_pause();
      }
    }
  }
  const Route route = agree(group_, call_);
  if (route != Route::kInline && route != Route::kOneShot) {
    group_.notify();
    return false;
  }
  Collective run(group_, call_);
  finish_ahead(run, route);
  group_.complete_quietly();
  return true;
}

Task run_shared_memory(Group& group, Call call, bool is_posted) {
  Collective run(group, call);
  if (!is_posted) {
    const std::uint8_t offer = offered_route(group, call);
    co_await group.may_post();
    if (group.size() > 1 && (offer & Post::kEager) != 0) {
      co_await group.may_deposit_first();
    }
    fill_post(group, call, offer);
    group.publish_post();
  }
  if (waits_for_posts(group, call)) {
    co_await group.posted_by_all();
  }

  const Route route = agree(group, call);
  switch (route) {
    case Route::kInline:
    case Route::kOneShot:
      finish_ahead(run, route);
      break;
    case Route::kPipelined:
      if (!contributed_blocks(group, call).empty() || call.kind == OpKind::kReduce) {
        group.prepare_transit();
      }
      if (call.kind == OpKind::kAllReduce || call.kind == OpKind::kReduce) {
        co_await reduce_through_transit(run);
      } else {
        co_await exchange_through_transit(run);
      }
      break;
    case Route::kSymmetric:
      co_await run_on_symmetric_heap(run);
      break;
  }
  group.complete();
}

}  // namespace pydist
