// What travels over a connection between two processes: frames, each a header and a payload.
//
// Hosts share no memory, so what a rank publishes in the memory of its own host (posts, counters,
// slots of channels) it also sends to the other hosts, where it is written to the same place. So
// whoever waits looks at memory, and need not know from where it was written.
//
// Frames of one connection arrive in order, those of different connections of a pair in any: the
// numbers in them say what belongs where. All numbers are little endian, as both processors are
// that pydist runs on.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/error.h"

namespace pydist {

static_assert(std::endian::native == std::endian::little);

enum class FrameKind : std::uint8_t {
  // Of a process.
  kHeartbeat = 1,
  kGoodbye,  // the process ends in good order
  // Of a group; `sender` and `receiver` are its ranks.
  kPost,       // number: of the operation; payload: posts of some ranks (PostRecord)
  kEager,      // number: of the round; extra: a rank whose post follows; payload: what lies in its
               // transit slot
  kDeposit,    // number: of the round; payload: what goes into the transit slot of rank `sender`
  kSegment,    // number: of the slot's filling, from 1; payload: what lies in the slot
  kReleased,   // number: slots that the receiver has released
  kAnnounced,  // number: of the message; payload: its announcement
  kHeard,      // number: announcements that the receiver has taken
  kGranted,    // number: of the grant; extra: of the message
  kFailure,    // payload: the group's error
  // For a host. number: how the rank leaves; extra: its farewell; payload: a byte for each rank of
  // the host, 1 where kLastSegment comes to it.
  kDeparture,
  kLastSegment,  // number: how many segments the rank has sent to this one before it left
  kPageRequest,  // number: the rank whose page is asked for
  kPage,         // sender: whose page it is; number: the monotonic clock of its host; payload: it
  // Of a group on gloo (c10d/gloo/gloo_control.h).
  kRecords,  // number: of the all-gather, and of its round; payload: records of some ranks
  kClosed,   // the rank has given its connections up
  kLast = kClosed,
};

struct FrameHeader {
  static constexpr std::uint16_t kMagic = 0x7970;

  std::uint16_t magic = kMagic;
  FrameKind kind = FrameKind::kHeartbeat;
  std::uint8_t lanes = 0;   // whose channel it is: LaneSet
  std::uint32_t bytes = 0;  // of the payload
  std::uint64_t group = 0;  // 0: of the process
  std::int32_t sender = 0;
  std::int32_t receiver = 0;
  std::uint64_t number = 0;
  std::uint64_t extra = 0;
};
static_assert(sizeof(FrameHeader) == 40);

// From one rank of a group to another.
[[nodiscard]] inline FrameHeader frame_between(FrameKind kind, std::uint64_t group, int sender,
                                               int receiver) noexcept {
  FrameHeader header;
  header.kind = kind;
  header.group = group;
  header.sender = sender;
  header.receiver = receiver;
  return header;
}

// A frame that is to be sent. Its header need not say how long the payload is.
struct Frame {
  FrameHeader header;
  std::span<const std::byte> payload;
};

// The most that a frame may hold: what is larger is cut.
inline constexpr std::size_t kMostPayload = std::size_t{32} << 20;

// What arrives can't be what a rank has sent: the connection is given up.
class BadFrame : public TransportError {
 public:
  explicit BadFrame(const std::string& what)
      : TransportError("What has come over the connection makes no sense: " + what) {}
};

// Where frames go: the group, or the process, that they are for.
class FrameSink {
 public:
  FrameSink() = default;
  FrameSink(const FrameSink&) = delete;
  FrameSink& operator=(const FrameSink&) = delete;
  virtual ~FrameSink() = default;

  // Where the payload of a frame goes: `header.bytes` of memory until it has been taken. Null: into
  // memory of the connection's own. Throws BadFrame where no rank sends such a frame. `sender` is
  // the process that it has come from, as the sink knows it.
  [[nodiscard]] virtual std::byte* place(const FrameHeader& header, std::uint64_t sender) = 0;
  // The payload is there.
  virtual void take(const FrameHeader& header, const std::byte* payload, std::uint64_t sender) = 0;
  // Nothing more will come from that process.
  virtual void lose(std::uint64_t sender) = 0;
};

}  // namespace pydist
