// Point-to-point messages of one rank with all others: matching by (peer, tag), and moving.
//
// Within one pair of ranks and one tag, messages match in order; everything else is independent:
// crossed sends never wait for each other, and a receive from anybody takes what was announced
// first. Used by one thread at a time.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "health/doorbell.h"
#include "transport/channel.h"
#include "transport/lane_segment.h"
#include "transport/message_ways.h"

namespace pydist {

// Carries what this rank writes into its lanes to the ranks on other hosts.
class MessageCarrier {
 public:
  MessageCarrier() = default;
  MessageCarrier(const MessageCarrier&) = delete;
  MessageCarrier& operator=(const MessageCarrier&) = delete;
  virtual ~MessageCarrier() = default;

  [[nodiscard]] virtual bool reaches(int peer) const noexcept = 0;
  [[nodiscard]] virtual std::unique_ptr<SendChannel> make_sender(int peer) = 0;
  [[nodiscard]] virtual std::unique_ptr<ReceiveChannel> make_receiver(int peer) = 0;

  // This rank has announced message `number` to `peer`, with what rides along; has heard so many of
  // its announcements; has granted its message `message` as the grant of that number.
  virtual void send_announcement(int peer, std::uint64_t number,
                                 std::span<const std::byte> announcement) = 0;
  virtual void send_heard(int peer, std::uint64_t heard) = 0;
  virtual void send_grant(int peer, std::uint64_t number, std::uint64_t message) = 0;
};

// How messages are copied from where their senders have them, between ranks of one host.
class MessageReads {
 public:
  MessageReads() = default;
  MessageReads(const MessageReads&) = delete;
  MessageReads& operator=(const MessageReads&) = delete;
  virtual ~MessageReads() = default;

  // Where `peer` finds a message of this rank's.
  [[nodiscard]] virtual MessagePlace place_of(int peer, const Buffer& buffer) const noexcept = 0;
  // Whether there may be messages in kProcess.
  [[nodiscard]] virtual bool may_read_processes() const noexcept = 0;
  // Copies what lies in a place of the rank `peer`, which keeps it there until it is told. False
  // where that can't be done, or it may have been something else by now: then the message comes
  // through its lane. Throws the group's failure.
  [[nodiscard]] virtual bool read(int peer, const MessagePlace& place,
                                  std::span<std::byte> target) const = 0;
};

class Messages {
 public:
  // To let a message be read saves its sender a copy, and has it wait for a grant, which takes as
  // long as to copy so many bytes. So what is no longer goes ahead, wherever it lies.
  static constexpr std::size_t kLongestNeverRead = std::size_t{32} << 10;

  // Called when a message is through, with the rank that it came from (sends: that it went to).
  using OnDone = std::function<void(int peer)>;

  // `carrier`: null where all ranks are on one host. `reads`: null where all go through lanes.
  // `ways`: which messages are read so.
  Messages(int rank, int size, LaneSegment segment, std::vector<Doorbell*> doorbells,
           MessageCarrier* carrier = nullptr, std::unique_ptr<MessageReads> reads = nullptr,
           MessageWays ways = MessageWays(TuningRhythm()));

  // Starts a message. The buffer stays untouched until it is done. Nothing moves before advance().
  void send(int peer, std::uint64_t tag, const Buffer& buffer, OnDone on_done);
  // From `peer`, or from anybody where there is none.
  void receive(std::optional<int> peer, std::uint64_t tag, const Buffer& buffer, OnDone on_done);

  // Where a message is to lie that rides along or goes ahead: there send_at_once() puts it. None
  // where it does neither, or something is in front of it, or its lane has no memory yet.
  [[nodiscard]] std::optional<MessagePlace> place_at_once(int peer, const Buffer& buffer) noexcept;
  void send_at_once(int peer, std::uint64_t tag, const Buffer& buffer,
                    const MessagePlace& place) noexcept;
  // Receives such a message, if it is the next one and nothing else is under way. Unless it is
  // kDone, at most the buffer has changed. `looks`: at each block that is not there yet. Throws as
  // advance() does.
  enum class AtOnce { kDone, kNotYet, kNever };
  [[nodiscard]] AtOnce try_receive(int peer, std::uint64_t tag, const Buffer& buffer,
                                   unsigned looks = 1);

  // Moves everything along that can be moved; returns whether anything was. Throws Mismatch where
  // a receive meets a message of another type or size.
  bool advance();

  // Whether nothing is under way.
  [[nodiscard]] bool is_idle() const noexcept { return pending_ == 0; }

 private:
  struct Send {
    std::uint64_t tag;
    Buffer buffer;
    OnDone on_done;
    std::uint64_t number = 0;  // among the lane's messages
    MessagePlace::In in = MessagePlace::In::kNowhere;
    std::size_t moved_bytes = 0;
  };
  struct Receive {
    std::optional<int> peer;
    std::uint64_t tag;
    Buffer buffer;
    OnDone on_done;
    std::uint64_t number = 0;
    MessagePlace place = {};    // at its sender
    bool do_both_send = false;  // this rank sends to that one, too
    MessageWays::Way way = {};  // from its grant on
    std::size_t moved_bytes = 0;
    MessageWays::Time begin = {};  // of the copying, if it has come ahead
  };
  // An announcement that has been heard, and the data that rides along with it.
  struct Heard {
    int peer;
    std::uint64_t number;
    Announcement announcement;
    const std::byte* payload;
  };
  // One that no receive has asked for yet.
  struct Unexpected {
    Heard heard;
    std::vector<std::byte> payload;  // what heard.payload points to
  };
  // To one peer.
  struct Outgoing {
    std::unique_ptr<SendChannel> channel;  // between hosts
    bool is_reserved = false;
    std::deque<Send> unannounced;
    std::list<Send> announced;  // waiting for their grant
    std::deque<Send> granted;
    std::uint64_t grants_seen = 0;
    // Something that has to be granted, since the last such message came from there.
    bool has_announced = false;
  };
  // With one peer inside a host, both ways.
  struct Pair {
    BlockPool ahead;
    BlockStream stream;
  };
  // From one peer.
  struct Incoming {
    std::unique_ptr<ReceiveChannel> channel;  // between hosts
    std::deque<Receive> matched;              // in the order of their grants
    std::size_t granted = 0;                  // how many of them are
    std::deque<Receive> ahead;     // matched as well: what has come ahead, and is not all copied
    std::uint64_t told_heard = 0;  // between hosts
    MessageWays::Time last_come;   // when the last one had come through the lane
  };

  [[nodiscard]] Pair& pair_with(int peer) noexcept {
    return pairs_[static_cast<std::size_t>(peer)];
  }
  // The carrier, where `peer` is on another host.
  [[nodiscard]] MessageCarrier* carrier_to(int peer) const noexcept {
    return carrier_ != nullptr && carrier_->reaches(peer) ? carrier_ : nullptr;
  }
  [[nodiscard]] bool rides_along(int sender, int receiver, const Buffer& buffer) const noexcept {
    return buffer.bytes() <= segment_.most_riding_bytes(sender, receiver);
  }
  // Where a message is to lie for its receiver. Another time it may be another place: what its
  // receiver would rather read changes meanwhile.
  [[nodiscard]] MessagePlace place_of(int peer, const Buffer& buffer) noexcept;
  // Fills in the announcement of message `number`, for which there is room, publishes it, and fills
  // the blocks that it names.
  void publish(int peer, std::uint64_t number, std::uint64_t tag, const Buffer& buffer,
               const MessagePlace& place);
  [[nodiscard]] bool may_announce(int peer) const noexcept;
  bool announce(int peer, Outgoing& lane);
  bool take_grants(int peer, Outgoing& lane);
  bool move_out(int peer, Outgoing& lane);
  bool hear(int peer);
  // Tells a rank on another host how many of its announcements have been heard, now and then: a
  // receive need not wait for that to be sent.
  void tell_heard(int peer, std::uint64_t heard);
  // That a message which comes ahead can be in the blocks that its announcement names.
  void require_blocks(int peer, const Announcement& announcement, const Buffer& buffer);
  // Throws Mismatch.
  void require_alike(const Buffer& buffer, int peer, const Announcement& announcement) const;
  bool match(std::list<Receive>::iterator receive, const Heard& heard);
  // Whether there is room for one more grant.
  [[nodiscard]] bool may_grant(int peer) const noexcept;
  bool grant(int peer, Incoming& lane);
  // Of a message that comes, or has come, from `begin` on: in what way, and its sender is told
  // where the next ones of its length had better come in another.
  [[nodiscard]] MessageWays::Way choose_way(int peer, const Receive& receive,
                                            MessageWays::Time begin);
  // Copies a message from its sender if it comes that way.
  [[nodiscard]] bool take(int peer, Receive& receive);
  // It has come through the lane.
  void note_come(int peer, const Receive& receive);
  bool move_in(int peer, Incoming& lane);
  // Copies the next piece of a message of which so much is left, if it has come. Returns its
  // length.
  std::size_t receive_piece(int peer, Incoming& lane, std::byte* target, std::size_t left);
  // Copies what is there of a message that comes ahead, and has begun to. Whether that is all.
  [[nodiscard]] bool copy_ahead(int peer, Receive& receive);
  bool move_ahead(int peer, Incoming& lane);
  void finish(OnDone& on_done, int peer);
  // What `peer` has written into shared memory can't be.
  [[noreturn]] static void throw_damaged(int peer, const std::string& what);

  const int rank_;
  const int size_;
  LaneSegment segment_;
  std::vector<Doorbell*> doorbells_;
  MessageCarrier* carrier_;
  std::unique_ptr<MessageReads> reads_;
  MessageWays ways_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::vector<Pair> pairs_;
  std::list<Receive> unmatched_;      // in the order of posting
  std::list<Unexpected> unexpected_;  // in the order of hearing
  std::size_t pending_ = 0;
};

}  // namespace pydist
