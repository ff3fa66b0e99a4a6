// The layout of the memory of one group, which its ranks on one host share.
//
//   | failure | control of rank 0 | ... | control of rank p-1 | transit of rank 0 | ... | stages |
//
// Everything but the record of failure has one writer, the rank that it belongs to, which also
// reserves it: so it lies on that rank's NUMA node, and that rank's cgroup pays for it. The stages,
// which ranks write and read before they all have reserved anything, the lowest rank of the host
// reserves before it lets others map the segment; so it does with the record of failure. Of two
// ranks each writes into the other's transit as well, and the first to need any reserves both: see
// Note [Transits that are exchanged] in group.h. For a rank on another host, the rank here that
// hears of it writes (communicator/peers/remote_ranks.h), and the lowest rank of this host
// reserves. Controls are reserved when the group is made; a rank reserves its transit when it first
// needs it, so that a group that only moves small things takes a few pages.

#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/op_kind.h"
#include "base/reduce_op.h"
#include "collectives/slices.h"
#include "health/condition.h"
#include "health/failure_record.h"
#include "memory/shared_segment.h"

namespace pydist {

// How many collectives a rank may be ahead of the slowest one.
inline constexpr std::size_t kPostDepth = 8;
// Data that travels with the post itself: in its first line, or in the four lines behind.
inline constexpr std::size_t kFirstLineBytes = 40;
inline constexpr std::size_t kInlineBytes = 256;
// Chunks of a rank in flight: one is written, one reduced, one read, one spare.
inline constexpr std::size_t kTransitSlots = 4;

// Where a rank's data is for the others, when it posts.
enum class Offer : std::uint8_t {
  kInPieces,      // nowhere yet: it goes through transit once all have posted
  kInFirstLine,   // in the post
  kInLines,       // in the post, in the lines behind the first
  kEager,         // in the transit slot of the operation's first round
  kSymmetric,     // at detail.input and .output in the symmetric heap
  kOnHostHeap,    // the same, where each host has a heap of its own
  kShared,        // at detail.input and .output in the rank's allocation heap
  kInItsProcess,  // at the address detail.input of the rank's process, see ProcessMemory
};

// Whether the data rides in the post.
[[nodiscard]] constexpr bool is_inline(Offer offer) noexcept {
  return offer == Offer::kInFirstLine || offer == Offer::kInLines;
}
// Whether it has been sent before anybody knows that all have posted.
[[nodiscard]] constexpr bool is_ahead(Offer offer) noexcept {
  return is_inline(offer) || offer == Offer::kEager;
}
// Whether others read it where it lies in the rank's own memory, and that alone.
[[nodiscard]] constexpr bool is_read_in_place(Offer offer) noexcept {
  return offer == Offer::kShared || offer == Offer::kInItsProcess;
}

// What a rank says of the collective that it enters: its first cache line holds all but data, so
// that a small operation costs one line a rank. Written before `sequence` is, read after.
struct alignas(128) Post {
  // The low bits of `flags` are an Offer.
  static constexpr std::uint8_t kOfferBits = 7;
  static_assert(static_cast<std::uint8_t>(Offer::kInItsProcess) == kOfferBits, "no bits for more");
  enum Flag : std::uint8_t {
    kRagged = 8,  // block_counts is filled in
    kTuned = 16,  // detail.word says how the data moves, see Note [Who chooses]
  };

  Counter sequence;  // of the operation, counted from 1
  OpKind kind;
  ReduceOp op;
  DType dtype;
  DType wire_dtype;
  std::uint8_t flags;
  std::array<std::uint8_t, 3> root_bytes;  // see root(); the line has no room for four
  std::uint64_t count;                     // see Call::count
  std::array<std::byte, kFirstLineBytes> first_line;
  // Begins with a line, since a vector that lies across two of them takes twice as long.
  alignas(64) std::array<std::byte, kInlineBytes> lines;

  [[nodiscard]] int root() const noexcept {
    return root_bytes[0] | root_bytes[1] << 8 | root_bytes[2] << 16;
  }
  // Up to 2^24 ranks.
  void set_root(int root) noexcept {
    for (std::size_t place = 0; place < root_bytes.size(); ++place) {
      root_bytes[place] = static_cast<std::uint8_t>(root >> (8 * place));
    }
  }

  [[nodiscard]] Offer offer() const noexcept { return static_cast<Offer>(flags & kOfferBits); }
  // Where data lies that rides in a post which offers it so.
  [[nodiscard]] std::byte* data(Offer its_offer) noexcept {
    return its_offer == Offer::kInLines ? lines.data() : first_line.data();
  }
  [[nodiscard]] const std::byte* data() const noexcept {
    return offer() == Offer::kInLines ? lines.data() : first_line.data();
  }
};
static_assert(offsetof(Post, lines) == 64);

// All of a post but its sequence number, which is written last.
inline constexpr std::size_t kPostBodyBytes = sizeof(Post) - sizeof(Counter);
[[nodiscard]] inline std::byte* body_of(Post& post) noexcept {
  return reinterpret_cast<std::byte*>(&post) + sizeof(Counter);
}

// What the rank that chooses for all says of the way that data takes (shared_memory/tuning.h).
struct TuningWord {
  enum class Next : std::uint8_t { kAsBefore, kAhead, kInPieces, kInPlace };

  std::uint32_t piece_bytes = 0;  // that a round of this operation moves
  std::uint8_t streams = 0;       // 1: results are stored past the caches
  // How ranks give their data in the next operation of this kind, root and size class.
  Next next = Next::kAsBefore;
  std::uint8_t size_class = 0;
  std::uint8_t is_of_shared = 0;  // 1: `next` is about data in the ranks' allocation heaps
};

// What only some operations need.
struct alignas(64) PostDetail {
  // HeapReferences into the heap that the Offer says, or an address.
  std::uint64_t input = 0;
  std::uint64_t output = 0;
  double factor = 1.0;      // premul_sum
  std::uint64_t total = 0;  // elements of all blocks together
  TuningWord word;
  // Of data that goes to other hosts ahead of the post: how much of the rank's transit slot it is.
  std::uint64_t eager_bytes = 0;
};
static_assert(sizeof(PostDetail) == 64);

// Prefetchers load what lies behind lines that are read in turn, up to the end of a page.
inline constexpr std::size_t kPrefetchBytes = 4096;
static_assert(sizeof(FailureRecord) % kPrefetchBytes == 0);

// How far a rank has come while the ranks of a group meet.
enum class MeetingStage : std::uint32_t {
  kNotYet,
  kShares,  // it has all memory that it shares with the ranks of its host
  kStands,  // it knows that the group stands
};

struct RankControl {
  std::array<Post, kPostDepth> posts;
  std::array<PostDetail, kPostDepth> details;
  // Written at the end of each operation and hardly ever read: a peer's processor that fetched it
  // together with the posts would make the write wait for the line to come back.
  alignas(kPrefetchBytes) Counter completed;  // collectives
  alignas(64) Counter deposited;              // rounds whose chunk this rank has written
  alignas(64) Counter reduced;                // rounds whose slice this rank has reduced
  alignas(64) Counter consumed;  // rounds in which this rank needs nobody's transit any more
  // Of a rank on another host: what it has sent into its transit slots here, by slot.
  struct Arrival {
    std::uint64_t round;
    std::uint64_t bytes;
  };
  std::array<Arrival, kTransitSlots> arrivals;
  // Collectives of which this rank has passed on what it had to (between_hosts/announcing.h).
  alignas(64) Counter passed_on;
  // The channel of the ring, which runs through the sender's transit.
  alignas(64) Counter ring_sent;                          // slots sent to the next rank
  std::array<std::uint32_t, kTransitSlots> ring_lengths;  // bytes in each of them
  alignas(64) Counter ring_released;                      // slots of the previous rank given back
  // Not 0 while the rank may write into the symmetric memory of others, see HeapWriting.
  alignas(64) std::atomic<std::uint32_t> writes_heap;
  // Set when the rank lets go of the group: to a Departure.
  alignas(64) std::atomic<std::uint32_t> has_left;
  std::atomic<std::uint64_t> farewell;  // Absence::done; written before `has_left` is
  // Not 0 where the rank can read the memory of all others through the kernel. Written while the
  // ranks meet.
  std::atomic<std::uint32_t> reads_processes;
};

class GroupSegment {
 public:
  GroupSegment() = default;
  GroupSegment(SharedSegment segment, int size, std::size_t chunk_bytes) noexcept;

  // Bytes of a segment for `size` ranks.
  [[nodiscard]] static std::size_t bytes(int size, std::size_t chunk_bytes) noexcept;

  // Backs the record of failure and the stages.
  void reserve_common() const;
  // So long a chunk has a line for the block of each receiver.
  [[nodiscard]] static constexpr std::size_t least_chunk_bytes(int size) noexcept {
    return static_cast<std::size_t>(size) * kLineBytes;
  }

  // Backs one rank's control.
  void reserve_control(int rank) const;
  // Backs one rank's transit.
  void reserve_transit(int rank) const;

  [[nodiscard]] FailureRecord& failure() const noexcept {
    return *reinterpret_cast<FailureRecord*>(segment_.data());
  }
  [[nodiscard]] std::atomic<MeetingStage>& stage(int rank) const noexcept {
    return reinterpret_cast<std::atomic<MeetingStage>*>(segment_.data() + stages_offset_)[rank];
  }
  [[nodiscard]] RankControl& control(int rank) const noexcept {
    return *reinterpret_cast<RankControl*>(segment_.data() + sizeof(FailureRecord) +
                                           static_cast<std::size_t>(rank) * control_stride_);
  }
  // Elements of each block that `rank` posted with the operation in the given slot.
  [[nodiscard]] std::uint64_t* block_counts(int rank, std::size_t post_slot) const noexcept;
  [[nodiscard]] std::byte* transit(int rank, std::uint64_t round) const noexcept;

  // From one rank's control to the next one's.
  [[nodiscard]] std::size_t control_stride() const noexcept { return control_stride_; }
  [[nodiscard]] std::size_t chunk_bytes() const noexcept { return chunk_bytes_; }
  [[nodiscard]] const SharedSegment& segment() const noexcept { return segment_; }

 private:
  SharedSegment segment_;
  int size_ = 0;
  std::size_t chunk_bytes_ = 0;
  std::size_t control_stride_ = 0;
  std::size_t transit_offset_ = 0;
  std::size_t stages_offset_ = 0;
};

}  // namespace pydist
