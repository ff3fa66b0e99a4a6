// One group of ranks, as the algorithms see it: posts, counters, transit, heap.
//
// The memory is that of the ranks of one host. Where a group spans hosts, each has one, and the
// posts of all ranks are in each: an Announcer carries them there. Counters, transit and heap are
// for the ranks of the host alone, but for what is sent ahead with a post (Offer::kEager) or in
// rounds (Announcer::send_deposit).
//
// Every rank runs the same collectives in the same order. Operation n of a group is announced by a
// post; all further coordination is by counters that only grow:
//   completed  operations;  deposited, reduced, consumed  rounds.
// Each rank has *transit* memory in the segment, a few slots of a chunk, through which ordinary
// tensors pass. A *round* moves one chunk of every rank through it. Rounds are numbered through the
// life of the group; each rank knows from what all ranks posted how many an operation takes.
//
// Note [Reuse]: a rank overwrites nothing that a peer may still read.
//   - A post is overwritten kPostDepth operations later, once every rank has completed the old one.
//   - A transit slot is overwritten kTransitSlots rounds later, once every rank has consumed the
//     old round. Of two ranks it may be the other one that overwrites it: what it has written
//     itself has been consumed by then, and where it has said so before it wrote (the senders of a
//     gather), it goes on only after that.
// A rank whose post n is seen has completed n-1, and has consumed every round of it. So operations
// in which everybody waits for everybody learn both for free; only the root of a broadcast or
// scatter, which waits for nobody, ever looks at the counters of slow ranks.
//
// Owned by a communicator; used by one thread at a time.

#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "collectives/call.h"
#include "collectives/group_segment.h"
#include "collectives/streaming_hint.h"
#include "health/condition.h"
#include "health/doorbell.h"
#include "memory/heap_window.h"
#include "memory/process_memory.h"
#include "memory/symmetric_heap.h"

namespace pydist {

// Carries what a rank says of its operations to the other hosts.
class Announcer {
 public:
  Announcer() = default;
  Announcer(const Announcer&) = delete;
  Announcer& operator=(const Announcer&) = delete;
  virtual ~Announcer() = default;

  // This rank's post of operation `sequence` is complete, and in its transit slot of `round` lies
  // what goes ahead of it: for all other hosts.
  virtual void send_post(std::uint64_t sequence, std::uint64_t round) = 0;
  // The same for one rank of another host, and of the posts of several ranks, all of which are
  // here. The last of them is the last that is seen there. `deposit`: as send_deposit(), ahead of
  // the posts; or nothing.
  virtual void send_posts(std::span<const int> ranks, int receiver, std::uint64_t sequence,
                          std::uint64_t round, std::span<const std::byte> deposit) = 0;
  // Puts data into this rank's transit slot of `round` on the host of `receiver`, and then raises
  // RankControl::deposited there.
  virtual void send_deposit(int receiver, std::uint64_t round, std::span<const std::byte> data) = 0;
};

class Tuning;

class Group {
 public:
  // `doorbells` of all ranks, in rank order. `announcer`: null on one host. `one_shot_bytes`: see
  // one_shot_limit(). `tuning`: null where nothing is tuned; it outlives the group. `windows` and
  // `processes`: of all ranks, in rank order, or none.
  Group(int rank, int size, GroupSegment segment, std::vector<Doorbell*> doorbells,
        const SymmetricHeap& heap, Announcer* announcer = nullptr,
        std::optional<std::size_t> one_shot_bytes = std::nullopt, Tuning* tuning = nullptr,
        std::vector<const HeapWindow*> windows = {}, std::vector<ProcessMemory> processes = {});

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }
  [[nodiscard]] std::size_t chunk_bytes() const noexcept { return segment_.chunk_bytes(); }
  [[nodiscard]] std::optional<std::size_t> one_shot_bytes() const noexcept {
    return one_shot_bytes_;
  }
  [[nodiscard]] Tuning* tuning() const noexcept { return tuning_; }
  [[nodiscard]] const SymmetricHeap& heap() const noexcept { return heap_; }
  // Null on one host.
  [[nodiscard]] Announcer* announcer() const noexcept { return announcer_; }
  [[nodiscard]] const GroupSegment& segment() const noexcept { return segment_; }

  // Whether each rank can read the allocation heaps of all others. Once it is so, it stays so.
  [[nodiscard]] bool shares_allocations() const noexcept {
    if (!shares_allocations_) {
      shares_allocations_ =
          !windows_.empty() && std::all_of(windows_.begin(), windows_.end(),
                                           [](const HeapWindow* each) { return each->is_on(); });
    }
    return shares_allocations_;
  }
  // The allocation heap of a rank; null where the group has none.
  [[nodiscard]] const HeapWindow* window(int rank) const noexcept {
    return windows_.empty() ? nullptr : windows_[static_cast<std::size_t>(rank)];
  }

  // Whether each rank can read the memory of all others through the kernel.
  [[nodiscard]] bool reads_processes() const noexcept { return !processes_.empty(); }
  // Precondition: reads_processes().
  [[nodiscard]] const ProcessMemory& process(int rank) const noexcept {
    return processes_[static_cast<std::size_t>(rank)];
  }

  // -- operations ---------------------------------------------------------------------------
  // Numbers the next operation; nothing is visible to peers yet.
  void begin() noexcept {
    ++sequence_;
    piece_bytes_ = segment_.chunk_bytes();
    store_hint_.reset();
  }
  [[nodiscard]] std::uint64_t sequence() const noexcept { return sequence_; }

  // That this operation's post, and its first transit slot, may be written.
  [[nodiscard]] Condition may_post() noexcept;
  [[nodiscard]] Condition may_deposit_first() noexcept { return may_deposit(round_); }

  // What may_post() and may_deposit_first() will say of the next operation, as far as it is known
  // without a look at the others' counters.
  [[nodiscard]] bool next_may_post() const noexcept {
    return sequence_ + 1 <= known_completed_ + kPostDepth;
  }
  [[nodiscard]] bool next_may_deposit() const noexcept {
    return round_ < known_consumed_ + kTransitSlots;
  }

  // The conditions for that. Once one holds, note_completed() or note_consumed() has to follow: it
  // looks how far the others are, which a rank that waits for nobody learns in no other way.
  [[nodiscard]] Condition until_next_may_post() const noexcept {
    return reached_by_all(&RankControl::completed, sequence_ + 1 - kPostDepth);
  }
  [[nodiscard]] Condition until_next_may_deposit() const noexcept {
    return reached_by_all(&RankControl::consumed, round_ + 1 - kTransitSlots);
  }
  void note_completed() noexcept {
    known_completed_ = std::max(known_completed_, least(&RankControl::completed, sequence_));
  }
  void note_consumed() noexcept {
    known_consumed_ = std::max(known_consumed_, least(&RankControl::consumed, round_));
  }

  // This rank's post of the operation, to fill in before publish_post().
  [[nodiscard]] Post& my_post() noexcept { return segment_.control(rank_).posts[slot()]; }
  [[nodiscard]] PostDetail& my_detail() noexcept { return segment_.control(rank_).details[slot()]; }
  [[nodiscard]] std::uint64_t* my_block_counts() noexcept {
    return segment_.block_counts(rank_, slot());
  }
  // `eager_bytes`: how much of its transit slot of the first round goes to other hosts with it.
  void publish_post(std::size_t eager_bytes = 0);
  // The same on this host alone; announcer(), which there is, takes it to the others.
  void publish_post_on_host(std::size_t eager_bytes);
  // Says that this rank has passed on what it had to of this operation.
  void publish_passed_on() noexcept;
  [[nodiscard]] Condition passed_on_by(int rank) const noexcept {
    return {segment_.control(rank).passed_on, rank, sequence_};
  }
  // The same on one host, but wakes nobody: notify() or complete(), or a sequentially consistent
  // fence and ring_after_fence(), have to follow.
  void publish_post_quietly() noexcept {
    my_post().sequence.store(sequence_, std::memory_order_release);
  }

  [[nodiscard]] Condition posted_by_all() const noexcept {
    return {segment_.control(0).posts[slot()].sequence, segment_.control_stride(), size_, rank_,
            sequence_};
  }
  // The same of one rank.
  [[nodiscard]] Condition posted_by(int rank) const noexcept {
    return {segment_.control(rank).posts[slot()].sequence, rank, sequence_};
  }
  // To call once posted_by_all() holds, see Note [Reuse].
  void note_all_posted() noexcept {
    known_completed_ = sequence_ - 1;
    known_consumed_ = round_;
  }

  // Once the condition of posted_by_all() holds.
  [[nodiscard]] const Post& post(int rank) const noexcept {
    return segment_.control(rank).posts[slot()];
  }
  [[nodiscard]] const PostDetail& detail(int rank) const noexcept {
    return segment_.control(rank).details[slot()];
  }
  // Elements of the block for `block` that `rank` posted.
  [[nodiscard]] std::uint64_t posted_count(int rank, int block) const noexcept;

  // The operation is over for this rank.
  void complete() noexcept;
  // The same, but wakes nobody: a sequentially consistent fence and ring_after_fence() have to
  // follow.
  void complete_quietly() noexcept {
    // Release: this rank's reads of its peers' posts come before the store.
    segment_.control(rank_).completed.store(sequence_, std::memory_order_release);
  }

  // -- rounds -------------------------------------------------------------------------------
  // How much of a chunk a round of this operation moves, and how its results are stored where that
  // has been chosen; the same on every rank.
  [[nodiscard]] std::size_t piece_bytes() const noexcept { return piece_bytes_; }
  [[nodiscard]] std::optional<StoreHint> store_hint() const noexcept { return store_hint_; }
  void move_by(const TuningWord& word) noexcept {
    piece_bytes_ = word.piece_bytes;
    store_hint_ = word.streams != 0 ? StoreHint::kStreaming : StoreHint::kCached;
  }
  // The first round of this operation.
  [[nodiscard]] std::uint64_t round() const noexcept { return round_; }
  // Every rank calls it once an operation, with the same number.
  void advance_rounds(std::uint64_t rounds) noexcept { round_ += rounds; }

  // That this rank may write its chunk of `round`.
  [[nodiscard]] Condition may_deposit(std::uint64_t round) noexcept;
  // Backs the transit that this rank writes with memory, the first time.
  void prepare_transit();
  [[nodiscard]] std::byte* transit(int rank, std::uint64_t round) const noexcept {
    return segment_.transit(rank, round);
  }
  // The same for what is deposited ahead of the posts, and for exchanges.
  //
  // Note [Transits that are exchanged]: a core writes faster to lines that it has read last than to
  // lines that another one has. So two ranks on one host exchange their transits whenever all slots
  // have been used, and each writes where it has read kTransitSlots rounds before. What ranks
  // deposit ahead, before they know whether they agree on the kind, never goes into one slot. See
  // decision 11.
  [[nodiscard]] std::byte* exchanged_transit(int rank, std::uint64_t round) const noexcept {
    const bool is_exchanged = may_exchange_transits() && (round / kTransitSlots) % 2 != 0;
    return segment_.transit(is_exchanged ? 1 - rank : rank, round);
  }

  using CounterOf = Counter RankControl::*;
  // Says that this rank has done `round` (and all before).
  void publish(CounterOf counter, std::uint64_t round) noexcept;
  // The same, but wakes nobody: complete() has to follow.
  void publish_quietly(CounterOf counter, std::uint64_t round) noexcept {
    (segment_.control(rank_).*counter).store(round + 1, std::memory_order_release);
  }
  [[nodiscard]] Condition done_by(CounterOf counter, int rank, std::uint64_t round) const noexcept;
  // What a rank of another host has sent into its transit slot of `round`, which is there; null
  // where it is not so many bytes, as from a rank whose memory is damaged.
  [[nodiscard]] const std::byte* arrived(int rank, std::uint64_t round,
                                         std::size_t bytes) const noexcept;
  [[nodiscard]] Condition done_by_all(CounterOf counter, std::uint64_t round) const noexcept;

  // Wakes peers that sleep; for counters that are published otherwise.
  void notify() noexcept;
  // notify() for a caller that has executed a fence. Any thread may call it, also without the right
  // to drive.
  void ring_after_fence() noexcept {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) {
        doorbells_[static_cast<std::size_t>(peer)]->ring_after_fence();
      }
    }
  }

 private:
  [[nodiscard]] bool may_exchange_transits() const noexcept {
    return size_ == 2 && announcer_ == nullptr;
  }
  [[nodiscard]] std::size_t slot() const noexcept { return sequence_ % kPostDepth; }
  [[nodiscard]] Condition reached_by_all(CounterOf counter, std::uint64_t target) const noexcept;
  // How far all other ranks are, `own` at most.
  [[nodiscard]] std::uint64_t least(CounterOf counter, std::uint64_t own) const noexcept;

  const int rank_;
  const int size_;
  GroupSegment segment_;
  std::vector<Doorbell*> doorbells_;
  const SymmetricHeap& heap_;
  Announcer* const announcer_;
  const std::optional<std::size_t> one_shot_bytes_;
  Tuning* const tuning_;
  const std::vector<const HeapWindow*> windows_;
  const std::vector<ProcessMemory> processes_;
  mutable bool shares_allocations_ = false;
  bool has_transit_ = false;
  std::uint64_t sequence_ = 0;
  std::uint64_t round_ = 0;
  std::size_t piece_bytes_ = 0;
  std::optional<StoreHint> store_hint_;
  // What every rank is known to have reached.
  std::uint64_t known_completed_ = 0;
  std::uint64_t known_consumed_ = 0;
};

}  // namespace pydist
