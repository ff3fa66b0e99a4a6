// The layout of the shared memory for point-to-point messages of one group on one host: a lane for
// every ordered pair of ranks (a rank and itself included).
//
// A message is announced by its sender, matched by its receiver, and moved when the receiver
// grants it, in the order of the grants. So a message that nobody has asked for never blocks
// another one, and nothing is buffered beyond the lane's slots.
//
//   sender    announces message n: tag, type, count; up to 32 bytes of data ride along
//   receiver  hears the announcement; when a receive matches, grants message n
//   sender    sends the granted message through the slots; receiver copies it out
//
// Each rank reserves what it sends through: the counters of its lanes when the group is made, the
// rest of a lane at its first message.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "health/condition.h"
#include "memory/shared_segment.h"
#include "transport/shm_channel.h"

namespace pydist {

inline constexpr std::size_t kLaneDepth = 16;  // announcements, and grants, in flight
inline constexpr std::size_t kInlineMessageBytes = 32;

struct alignas(64) Announcement {
  std::uint64_t tag;
  std::uint64_t count;  // elements
  DType dtype;
  std::array<std::byte, kInlineMessageBytes> payload;
};
static_assert(sizeof(Announcement) == 64);

struct LaneCounters {
  alignas(64) Counter announced;  // by the sender
  alignas(64) Counter heard;      // by the receiver
  alignas(64) Counter granted;    // by the receiver
  alignas(64) Counter sent;       // by the sender
  alignas(64) Counter released;   // by the receiver
};

struct LaneRings {
  std::array<Announcement, kLaneDepth> announcements;
  std::array<std::uint64_t, kLaneDepth> grants;  // numbers of messages
};

class MessageSegment {
 public:
  MessageSegment() = default;
  MessageSegment(SharedSegment segment, int size) noexcept;

  [[nodiscard]] static std::size_t bytes(int size) noexcept;
  // Those of the lanes of one sender.
  void reserve_counters(int sender) const;
  // For the sender of a lane.
  void reserve_lane(int sender, int receiver) const;

  [[nodiscard]] LaneCounters& counters(int sender, int receiver) const noexcept;
  [[nodiscard]] LaneRings& rings(int sender, int receiver) const noexcept;
  [[nodiscard]] ShmChannelMemory channel(int sender, int receiver) const noexcept;

 private:
  [[nodiscard]] std::size_t lane(int sender, int receiver) const noexcept {
    return static_cast<std::size_t>(sender) * static_cast<std::size_t>(size_) +
           static_cast<std::size_t>(receiver);
  }
  [[nodiscard]] std::size_t lane_offset(int sender, int receiver) const noexcept;

  SharedSegment segment_;
  int size_ = 0;
};

}  // namespace pydist
