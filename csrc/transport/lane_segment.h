// The layout of memory for what passes between two ranks of a group: a lane for every ordered pair
// of ranks of which one, or both, are on this host (a rank and itself included). The ranks of a
// host share it. What a rank of another host writes into a lane is written there by the one that
// has received it, see transport/tcp/frame.h.
//
// A group has one set of lanes for messages, and one that spans hosts another for its collectives,
// which use the slots alone. Messages:
//
// A message is announced by its sender, matched by its receiver, and moved when the receiver
// grants it, in the order of the grants. So a message that nobody has asked for never blocks
// another one. Besides the lane, a receiver keeps of such messages what has come with their
// announcements: a few KiB each, in memory of its own.
//
//   sender    announces message n: tag, type, count; data of a few KiB rides along
//   receiver  hears the announcement; when a receive matches, grants message n
//   sender    sends the granted message piece by piece; receiver copies them out
//
// Inside a host the pieces are blocks that both ranks fill (block_stream.h). With a message of up
// to 16 blocks its sender fills others while it announces it, if it has free ones (block_pool.h):
// it goes *ahead* of a grant, and needs none.
//
// Where processes of one host may read each other's memory, the receiver may copy the data from
// where its sender has it, and tell with its grant that it has.
//
// Each rank reserves what it sends through: the counters of its lanes when the group is made, the
// rest of a lane at its first message. For a sender on another host the receiver does.

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "health/condition.h"
#include "memory/shared_segment.h"
#include "topology/placement.h"
#include "transport/block_pool.h"
#include "transport/block_stream.h"
#include "transport/shm_channel.h"
#include "tuning/tuning_class.h"

namespace pydist {

inline constexpr std::size_t kLaneDepth = 24;  // announcements, and grants, in flight
// Between hosts so many are heard before their sender is told; it may always announce the others.
inline constexpr std::size_t kHeardAtATime = 8;
static_assert(kLaneDepth - kHeardAtATime >= 15, "sixteen short ones go before anybody asks");
inline constexpr std::size_t kMostLaneSlots = 8;

// Where a message lies, for a receiver that copies it from there.
struct MessagePlace {
  enum class In : std::uint8_t {
    kNowhere,     // where nobody else can read it
    kProcess,     // at that address of the sender's process
    kSharedHeap,  // there in the sender's allocation heap, see HeapWindow
    kAhead,       // in those blocks of the two ranks, a BlockSet
  };
  In in = In::kNowhere;
  std::uint64_t address = 0;
};

// The data that rides along lies right behind it. The shortest shares its cache line.
struct alignas(32) Announcement {
  std::uint64_t tag;
  std::uint64_t count;    // elements
  std::uint64_t address;  // as MessagePlace::address
  DType dtype;
  MessagePlace::In in;
  std::uint32_t riding_bytes;  // all of the message, or 0

  [[nodiscard]] std::byte* payload() noexcept { return reinterpret_cast<std::byte*>(this + 1); }
  [[nodiscard]] const std::byte* payload() const noexcept {
    return reinterpret_cast<const std::byte*>(this + 1);
  }
};
static_assert(sizeof(Announcement) == 32);

// In a grant: the receiver has copied the message from where its sender has it.
inline constexpr std::uint64_t kTaken = std::uint64_t{1} << 63;

struct LaneCounters {
  alignas(64) Counter announced;  // by the sender
  alignas(64) Counter heard;      // by the receiver
  alignas(64) Counter granted;    // by the receiver
  alignas(64) Counter obeyed;     // by the sender: grants that it has seen; inside a host
  alignas(64) Counter sent;       // by the sender
  alignas(64) Counter released;   // by the receiver
  // Of messages, inside a host. By the sender, of the blocks that it fills ahead: BlockPool's
  // words.
  alignas(64) BlockWord filled;
  BlockWord given_back;
  BlockWord stream_given_back;
  // By the receiver: size classes, a bit each, of which it would rather read the messages where
  // their sender has them than have blocks filled with them.
  alignas(64) std::atomic<std::uint64_t> reads;
  // Of messages, between hosts: the sender has left the group, and what it has sent to the receiver
  // ends with kLastSegment (tcp/frame.h), which comes over a connection of the two.
  std::atomic<std::uint32_t> awaits_last_segment;
};

// The bit of messages of so many bytes in LaneCounters::reads, and whether it is set.
[[nodiscard]] constexpr std::uint64_t bit_of_reads(std::size_t bytes) noexcept {
  return std::uint64_t{1} << size_class_of(bytes);
}
[[nodiscard]] inline bool is_to_be_read(const LaneCounters& counters, std::size_t bytes) noexcept {
  return (counters.reads.load(std::memory_order_relaxed) & bit_of_reads(bytes)) != 0;
}

// Followed by the announcements, if the lane is one for messages.
struct alignas(64) LaneRings {
  std::array<std::uint64_t, kLaneDepth> grants;  // numbers of messages, or with kTaken
  std::array<std::uint32_t, kMostLaneSlots> lengths;
  alignas(64) BlockStream::Pieces pieces;  // of messages, inside a host
};

// The slots of each lane of a set. All lanes take address space; memory is taken by those in use.
struct LaneShape {
  std::size_t slots;
  std::size_t window;         // see SendChannel
  std::size_t release_every;  // see ShmChannelMemory
  std::size_t slot_bytes;     // at most
  // Between ranks of one host a slot is longer where there are many hosts: it takes so much for
  // each, up to so much together.
  std::size_t bytes_for_a_host;
  std::size_t bytes_for_all_hosts;
  // Address space for the slots of all lanes inside a host, and as much for all others: it decides
  // how long each slot is. (Blocks take half as much again.)
  std::size_t all_bytes;
  bool is_for_messages;  // has announcements and, inside a host, blocks in place of slots
};
inline constexpr LaneShape kMessageLanes{.slots = 4,
                                         .window = 1,
                                         .release_every = 1,
                                         .slot_bytes = std::size_t{256} << 10,
                                         .bytes_for_a_host = 0,
                                         .bytes_for_all_hosts = 0,
                                         .all_bytes = std::size_t{256} << 20,
                                         .is_for_messages = true};
// What is under way between hosts hides the time that it takes to arrive. Every packet costs as
// much as tens of KiB, and a segment may end in a small one: so segments are long (a chunk and a
// little, see Note [Whole packets]), and slots are released in pairs. Longer ones than 512 KiB
// leave the cache before they are worked on.
[[nodiscard]] constexpr LaneShape collective_lanes(std::size_t chunk_bytes) noexcept {
  const std::size_t segment = std::min(chunk_bytes, std::size_t{512} << 10);
  return {.slots = 8,
          .window = 3,
          .release_every = 2,
          .slot_bytes = segment + segment / 16,
          .bytes_for_a_host = std::size_t{32} << 10,
          .bytes_for_all_hosts = std::size_t{1} << 20,
          .all_bytes = std::size_t{4} << 30,
          .is_for_messages = false};
}
// What is under way and not released (Note [Segments ahead]) has room, and so has what is released
// and not yet told.
static_assert(2 * collective_lanes(0).window + 1 + collective_lanes(0).release_every - 1 <=
              collective_lanes(0).slots);

// Which lanes a host has, those with one of its ranks at an end, and in which place each is.
class LaneTable {
 public:
  LaneTable() = default;
  // Of a host on its own.
  explicit LaneTable(int size) noexcept : size_(size), here_(size), most_here_(size) {}
  LaneTable(const Placement& placement, int host);

  // Places, each for one lane.
  [[nodiscard]] std::size_t count() const noexcept { return lanes_of(here_); }
  [[nodiscard]] std::size_t count_inside() const noexcept { return pairs(here_, here_); }
  // The same on the host that has the most: known on all hosts, whose slots are equally long.
  [[nodiscard]] std::size_t most() const noexcept { return lanes_of(most_here_); }
  [[nodiscard]] std::size_t most_inside() const noexcept { return pairs(most_here_, most_here_); }
  [[nodiscard]] std::size_t hosts() const noexcept { return hosts_; }

  // Precondition: there is such a lane.
  [[nodiscard]] std::size_t place_of(int sender, int receiver) const noexcept;
  // Those of a sender lie side by side from the first on.
  [[nodiscard]] std::size_t first_of(int sender) const noexcept;
  [[nodiscard]] std::size_t count_of(int sender) const noexcept {
    return static_cast<std::size_t>(is_here(sender) ? size_ : here_);
  }

  // Whether both ranks are on this host; and the place of their lane among those of such ranks.
  [[nodiscard]] bool is_inside(int sender, int receiver) const noexcept {
    return is_here(sender) && is_here(receiver);
  }
  [[nodiscard]] std::size_t place_inside(int sender, int receiver) const noexcept {
    return pairs(index_here(sender), here_) + static_cast<std::size_t>(index_here(receiver));
  }

 private:
  static constexpr std::size_t pairs(int some, int others) noexcept {
    return static_cast<std::size_t>(some) * static_cast<std::size_t>(others);
  }
  // Of a host with so many ranks.
  [[nodiscard]] std::size_t lanes_of(int ranks) const noexcept {
    return (hosts_ == 1 ? 1 : 2) * pairs(ranks, size_);
  }
  // Among the ranks of this host; negative: it is on another one.
  [[nodiscard]] int index_here(int rank) const noexcept {
    return index_ == nullptr ? rank : (*index_)[static_cast<std::size_t>(rank)];
  }
  [[nodiscard]] bool is_here(int rank) const noexcept { return index_here(rank) >= 0; }

  int size_ = 0;
  std::size_t hosts_ = 1;
  int here_ = 0;                                   // ranks on this host
  int most_here_ = 0;                              // on the host that has the most
  std::shared_ptr<const std::vector<int>> index_;  // null: all are here
};

// Which of a group's sets a lane belongs to.
enum class LaneSet : std::uint8_t { kMessages, kCollectives };

inline constexpr std::size_t kAheadBlocks = 32;  // of each rank
// Of a block to fill ahead, and of a piece of a long message, where a slot has so many bytes.
[[nodiscard]] constexpr std::size_t block_bytes_of(std::size_t slot_bytes) noexcept {
  return slot_bytes / 8;
}
[[nodiscard]] constexpr std::size_t piece_bytes_of(std::size_t slot_bytes) noexcept {
  return slot_bytes / 2;
}

// Of a lane, from its begin. Its rings are first, the announcements behind them, and then, of
// messages inside a host, the blocks that its sender begins with; of others, the slots.
struct LaneLayout {
  std::size_t slot_bytes = 0;
  std::size_t riding_bytes = 0;        // with an announcement, at most
  std::size_t announcement_bytes = 0;  // from one to the next
  std::size_t data = 0;  // offset of the slots or blocks; those of the stream come last
  std::size_t block_bytes = 0;
  std::size_t piece_bytes = 0;  // of a block of the stream
  std::size_t bytes = 0;        // all

  [[nodiscard]] std::size_t stream() const noexcept { return data + kAheadBlocks * block_bytes; }
};

class LaneSegment {
 public:
  LaneSegment() = default;
  LaneSegment(SharedSegment segment, LaneTable table, const LaneShape& shape) noexcept;

  [[nodiscard]] static std::size_t bytes(const LaneTable& table, const LaneShape& shape) noexcept;
  // Of each slot of a lane between hosts, and inside a host: the same on all hosts.
  [[nodiscard]] std::size_t slot_bytes() const noexcept { return between_.slot_bytes; }
  [[nodiscard]] std::size_t slot_bytes_inside() const noexcept { return inside_.slot_bytes; }
  [[nodiscard]] std::size_t window() const noexcept { return shape_.window; }
  // Those of the lanes of one sender.
  void reserve_counters(int sender) const;
  // For the sender of a lane. Inside a host its receiver's blocks come with it: they are filled
  // from both ends.
  void reserve_lane(int sender, int receiver) const;

  [[nodiscard]] LaneCounters& counters(int sender, int receiver) const noexcept;
  [[nodiscard]] LaneRings& rings(int sender, int receiver) const noexcept;
  // Of a set for messages.
  [[nodiscard]] Announcement& announcement(int sender, int receiver,
                                           std::uint64_t number) const noexcept;
  // How much data rides along with an announcement, at most; the same at both ends.
  [[nodiscard]] std::size_t most_riding_bytes(int sender, int receiver) const noexcept;
  // Precondition: the lane has slots.
  [[nodiscard]] ShmChannelMemory channel(int sender, int receiver) const noexcept;
  // Of a lane for messages inside a host: the end of `rank` of what it shares with `peer`.
  [[nodiscard]] BlockPool ahead_pool(int rank, int peer) const noexcept;
  [[nodiscard]] BlockPool stream_pool(int rank, int peer) const noexcept;
  [[nodiscard]] BlockStream stream(int rank, int peer) const noexcept;

 private:
  struct Lane {
    std::size_t offset;
    const LaneLayout* layout;
  };
  [[nodiscard]] Lane lane(int sender, int receiver) const noexcept;
  // The one whose words those are, `offset` behind the beginning of each lane.
  [[nodiscard]] BlockPool pool(int rank, int peer, std::size_t offset,
                               const BlockPool::Shape& shape, BlockWord LaneCounters::* filled,
                               BlockWord LaneCounters::* given_back) const noexcept;
  [[nodiscard]] std::byte* at(std::size_t offset) const noexcept {
    return segment_.data() + offset;
  }

  SharedSegment segment_;
  LaneTable table_;
  LaneShape shape_ = kMessageLanes;
  LaneLayout inside_;
  LaneLayout between_;
  std::size_t first_inside_ = 0;  // offset of such a lane
  std::size_t first_between_ = 0;
};

}  // namespace pydist
