#include "transport/messages.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "base/error.h"
#include "transport/shm_channel.h"

namespace pydist {
namespace {

[[noreturn]] void throw_damaged(int peer, const std::string& what) {
  throw Error(ErrorKind::kError,
              join("Rank ", peer, " ", what,
                   ": its shared memory has been damaged. Look for "
                   "writes out of bounds in that process."),
              Blame{.ranks = {peer}, .cause = "its shared memory is damaged"});
}

}  // namespace

Messages::Messages(int rank, int size, LaneSegment segment, std::vector<Doorbell*> doorbells,
                   MessageCarrier* carrier, std::unique_ptr<MessageReads> reads, MessageWays ways)
    : rank_(rank),
      size_(size),
      segment_(std::move(segment)),
      doorbells_(std::move(doorbells)),
      carrier_(carrier),
      reads_(std::move(reads)),
      ways_(std::move(ways)) {
  for (int peer = 0; peer < size; ++peer) {
    Outgoing& out = outgoing_.emplace_back();
    Incoming& in = incoming_.emplace_back();
    if (MessageCarrier* const carried = carrier_to(peer)) {
      out.channel = carried->make_sender(peer);
      in.channel = carried->make_receiver(peer);
    } else {
      Doorbell& doorbell = *doorbells_[static_cast<std::size_t>(peer)];
      out.channel = std::make_unique<ShmSendChannel>(segment_.channel(rank, peer), peer, doorbell);
      in.channel =
          std::make_unique<ShmReceiveChannel>(segment_.channel(peer, rank), peer, doorbell);
    }
  }
}

void Messages::send(int peer, std::uint64_t tag, const Buffer& buffer, OnDone on_done) {
  Outgoing& lane = outgoing_[static_cast<std::size_t>(peer)];
  if (!lane.is_reserved) {
    segment_.reserve_lane(rank_, peer);
    lane.is_reserved = true;
  }
  Send send{tag, buffer, std::move(on_done)};
  lane.unannounced.push_back(std::move(send));
  ++pending_;
}

bool Messages::may_send_at_once(int peer, const Buffer& buffer) const noexcept {
  return rides_along(rank_, peer, buffer) && carrier_to(peer) == nullptr && is_idle() &&
         outgoing_[static_cast<std::size_t>(peer)].is_reserved && may_announce(peer);
}

void Messages::send_at_once(int peer, std::uint64_t tag, const Buffer& buffer) noexcept {
  publish(peer, segment_.counters(rank_, peer).announced.load(std::memory_order_relaxed), tag,
          buffer);
}

Messages::AtOnce Messages::try_receive(int peer, std::uint64_t tag, const Buffer& buffer) {
  if (!rides_along(peer, rank_, buffer) || carrier_to(peer) != nullptr || !is_idle() ||
      !unexpected_.empty()) {
    return AtOnce::kNever;
  }
  LaneCounters& counters = segment_.counters(peer, rank_);
  const std::uint64_t number = counters.heard.load(std::memory_order_relaxed);
  const std::uint64_t announced = counters.announced.load(std::memory_order_acquire);
  if (announced == number) {
    return AtOnce::kNotYet;
  }
  if (announced - number > kLaneDepth) {
    return AtOnce::kNever;  // hear() says what is wrong
  }
  const Announcement& place = segment_.announcement(peer, rank_, number);
  const Announcement announcement = place;
  if (announcement.tag != tag) {
    return AtOnce::kNever;
  }
  require_alike(buffer, peer, announcement);
  if (announcement.riding_bytes != buffer.bytes()) {
    return AtOnce::kNever;  // match() says what is wrong
  }
  if (buffer.count != 0) {
    std::memcpy(buffer.data, place.payload(), buffer.bytes());
  }
  counters.heard.store(number + 1, std::memory_order_release);
  doorbells_[static_cast<std::size_t>(peer)]->ring();
  return AtOnce::kDone;
}

void Messages::receive(std::optional<int> peer, std::uint64_t tag, const Buffer& buffer,
                       OnDone on_done) {
  Receive receive{peer, tag, buffer, std::move(on_done)};
  unmatched_.push_back(std::move(receive));
  ++pending_;
  const auto posted = std::prev(unmatched_.end());
  for (auto heard = unexpected_.begin(); heard != unexpected_.end(); ++heard) {
    if (match(posted, heard->heard)) {
      unexpected_.erase(heard);
      return;
    }
  }
}

bool Messages::advance() {
  bool moved = false;
  for (int peer = 0; peer < size_; ++peer) {
    Outgoing& out = outgoing_[static_cast<std::size_t>(peer)];
    if (!out.unannounced.empty()) {
      moved = announce(peer, out) || moved;
    }
    if (!out.announced.empty()) {
      moved = take_grants(peer, out) || moved;
    }
    if (!out.granted.empty()) {
      moved = move_out(peer, out) || moved;
    }
  }
  for (int peer = 0; peer < size_; ++peer) {
    if (!unmatched_.empty()) {
      moved = hear(peer) || moved;
    }
    Incoming& in = incoming_[static_cast<std::size_t>(peer)];
    if (!in.matched.empty()) {
      moved = grant(peer, in) || moved;
      moved = move_in(peer, in) || moved;
    }
  }
  return moved;
}

void Messages::finish(OnDone& on_done, int peer) {
  --pending_;
  on_done(peer);
}

bool Messages::may_announce(int peer) const noexcept {
  const LaneCounters& counters = segment_.counters(rank_, peer);
  return counters.announced.load(std::memory_order_relaxed) -
             counters.heard.load(std::memory_order_acquire) <
         kLaneDepth;
}

MessagePlace::In Messages::publish(int peer, std::uint64_t number, std::uint64_t tag,
                                   const Buffer& buffer) {
  Announcement& announcement = segment_.announcement(rank_, peer, number);
  announcement.tag = tag;
  announcement.count = buffer.count;
  const bool rides = rides_along(rank_, peer, buffer);
  const MessagePlace place = rides || reads_ == nullptr || carrier_to(peer) != nullptr
                                 ? MessagePlace{}
                                 : reads_->place_of(peer, buffer);
  announcement.address = place.address;
  announcement.dtype = buffer.dtype;
  announcement.in = place.in;
  announcement.riding_bytes = 0;
  if (buffer.count != 0 && rides) {
    announcement.riding_bytes = static_cast<std::uint32_t>(buffer.bytes());
    std::memcpy(announcement.payload(), buffer.data, buffer.bytes());
  }
  segment_.counters(rank_, peer).announced.store(number + 1, std::memory_order_release);
  if (MessageCarrier* const carrier = carrier_to(peer)) {
    carrier->send_announcement(peer, number,
                               {reinterpret_cast<const std::byte*>(&announcement),
                                sizeof announcement + announcement.riding_bytes});
  }
  doorbells_[static_cast<std::size_t>(peer)]->ring();
  return place.in;
}

bool Messages::announce(int peer, Outgoing& lane) {
  bool moved = false;
  while (!lane.unannounced.empty() && may_announce(peer)) {
    Send send = std::move(lane.unannounced.front());
    lane.unannounced.pop_front();
    send.number = segment_.counters(rank_, peer).announced.load(std::memory_order_relaxed);
    send.in = publish(peer, send.number, send.tag, send.buffer);
    moved = true;
    if (rides_along(rank_, peer, send.buffer)) {
      finish(send.on_done, peer);
    } else {
      lane.announced.push_back(std::move(send));
      lane.has_announced = true;
    }
  }
  return moved;
}

bool Messages::take_grants(int peer, Outgoing& lane) {
  LaneCounters& counters = segment_.counters(rank_, peer);
  const std::uint64_t granted = counters.granted.load(std::memory_order_acquire);
  if (lane.grants_seen == granted) {
    return false;
  }
  for (; lane.grants_seen != granted; ++lane.grants_seen) {
    const std::uint64_t word = segment_.rings(rank_, peer).grants[lane.grants_seen % kLaneDepth];
    const std::uint64_t number = word & ~kTaken;
    const bool is_taken = (word & kTaken) != 0;
    const auto send = std::find_if(lane.announced.begin(), lane.announced.end(),
                                   [number](const Send& each) { return each.number == number; });
    if (send == lane.announced.end()) {
      throw_damaged(peer, join("grants message ", number, ", which was not announced"));
    }
    if (is_taken && send->in == MessagePlace::In::kNowhere) {
      throw_damaged(peer, "says that it has copied a message out of memory that it can't read");
    }
    Send granted_send = std::move(*send);
    lane.announced.erase(send);
    if (is_taken) {
      finish(granted_send.on_done, peer);
    } else {
      lane.granted.push_back(std::move(granted_send));
    }
  }
  if (carrier_to(peer) == nullptr) {
    counters.obeyed.store(granted, std::memory_order_release);
    doorbells_[static_cast<std::size_t>(peer)]->ring();
  }
  return true;
}

bool Messages::move_out(int peer, Outgoing& lane) {
  bool moved = false;
  while (!lane.granted.empty() && lane.channel->until_free().holds()) {
    Send& send = lane.granted.front();
    const std::size_t bytes =
        std::min(lane.channel->slot_bytes(), send.buffer.bytes() - send.moved_bytes);
    std::memcpy(lane.channel->slot(),
                static_cast<const std::byte*>(send.buffer.data) + send.moved_bytes, bytes);
    lane.channel->send(bytes);
    send.moved_bytes += bytes;
    moved = true;
    if (send.moved_bytes == send.buffer.bytes()) {
      OnDone on_done = std::move(send.on_done);
      lane.granted.pop_front();
      finish(on_done, peer);
    }
  }
  return moved;
}

bool Messages::hear(int peer) {
  LaneCounters& counters = segment_.counters(peer, rank_);
  const std::uint64_t announced = counters.announced.load(std::memory_order_acquire);
  std::uint64_t number = counters.heard.load(std::memory_order_relaxed);
  if (number == announced) {
    return false;
  }
  if (announced - number > kLaneDepth) {
    throw_damaged(peer, join("has announced ", announced - number, " messages to rank ", rank_,
                             " at once, and can't have"));
  }
  for (; number != announced; ++number) {
    const Announcement& place = segment_.announcement(peer, rank_, number);
    const Heard heard{peer, number, place, place.payload()};
    const std::size_t riding_bytes = heard.announcement.riding_bytes;
    if (riding_bytes > segment_.most_riding_bytes(peer, rank_)) {
      throw_damaged(peer,
                    join("lets ", riding_bytes, " bytes ride along with a message, and can't"));
    }
    if (heard.announcement.in > MessagePlace::In::kSharedHeap) {
      throw_damaged(peer, "has announced a message that lies in memory of no known kind");
    }
    bool is_matched = false;
    for (auto receive = unmatched_.begin(); receive != unmatched_.end() && !is_matched;) {
      is_matched = match(receive++, heard);
    }
    if (!is_matched) {
      // The sender needs its place for the next one.
      Unexpected& kept = unexpected_.emplace_back(heard);
      kept.payload.assign(heard.payload, heard.payload + riding_bytes);
      kept.heard.payload = kept.payload.data();
    }
    counters.heard.store(number + 1, std::memory_order_release);
  }
  tell_heard(peer, announced);
  doorbells_[static_cast<std::size_t>(peer)]->ring();
  return true;
}

void Messages::tell_heard(int peer, std::uint64_t heard) {
  MessageCarrier* const carrier = carrier_to(peer);
  Incoming& lane = incoming_[static_cast<std::size_t>(peer)];
  if (carrier != nullptr && heard - lane.told_heard >= kHeardAtATime) {
    carrier->send_heard(peer, heard);
    lane.told_heard = heard;
  }
}

void Messages::require_alike(const Buffer& buffer, int peer,
                             const Announcement& announcement) const {
  if (announcement.dtype != buffer.dtype || announcement.count != buffer.count) {
    throw Mismatch(
        join("Rank ", rank_, " receives ", buffer.count, " elements of ", to_string(buffer.dtype),
             " from rank ", peer, " with tag ", announcement.tag, ", but rank ", peer, " sends ",
             announcement.count, " of ", to_string(announcement.dtype),
             ". Both ends of a message must have the same dtype and count."),
        Blame{.ranks = {std::min(rank_, peer), std::max(rank_, peer)},
              .operation = join("receive from rank ", peer, " (tag ", announcement.tag, ")"),
              .cause = "both ends have different tensors"});
  }
}

bool Messages::match(std::list<Receive>::iterator receive, const Heard& heard) {
  const int peer = heard.peer;
  const Announcement& announcement = heard.announcement;
  if (receive->peer.value_or(peer) != peer || receive->tag != announcement.tag) {
    return false;
  }
  require_alike(receive->buffer, peer, announcement);
  const std::size_t bytes = receive->buffer.bytes();
  const bool has_come = rides_along(peer, rank_, receive->buffer);
  if (announcement.riding_bytes != (has_come ? bytes : 0)) {
    throw_damaged(peer, join("lets ", announcement.riding_bytes,
                             " bytes ride along with a message of ", bytes));
  }
  Receive matched = std::move(*receive);
  unmatched_.erase(receive);
  if (has_come) {
    if (bytes != 0) {
      std::memcpy(matched.buffer.data, heard.payload, bytes);
    }
    finish(matched.on_done, peer);
    return true;
  }
  matched.number = heard.number;
  matched.place = {announcement.in, announcement.address};
  matched.do_both_send =
      std::exchange(outgoing_[static_cast<std::size_t>(peer)].has_announced, false);
  incoming_[static_cast<std::size_t>(peer)].matched.push_back(std::move(matched));
  return true;
}

bool Messages::may_grant(int peer) const noexcept {
  const LaneCounters& counters = segment_.counters(peer, rank_);
  // Between hosts a grant whose data has come is done with, since data follows in their order.
  return carrier_to(peer) != nullptr || counters.granted.load(std::memory_order_relaxed) -
                                                counters.obeyed.load(std::memory_order_acquire) <
                                            kLaneDepth;
}

bool Messages::take(int peer, Receive& receive) {
  if (receive.place.in == MessagePlace::In::kNowhere || reads_ == nullptr ||
      carrier_to(peer) != nullptr) {
    return false;
  }
  const TunedMemory memory = receive.place.in == MessagePlace::In::kSharedHeap
                                 ? TunedMemory::kShared
                                 : TunedMemory::kOrdinary;
  receive.way =
      ways_.choose(receive.buffer.bytes(), memory, receive.do_both_send, Deadline::Clock::now());
  if (!receive.way.is_read()) {
    return false;
  }
  if (reads_->read(peer, receive.place,
                   {static_cast<std::byte*>(receive.buffer.data), receive.buffer.bytes()})) {
    MessageWays::note(receive.way, {}, Deadline::Clock::now());
    // Its sender has gone on filling the lane meanwhile.
    for (Receive& overtaken : incoming_[static_cast<std::size_t>(peer)].matched) {
      MessageWays::drop(overtaken.way);
    }
    return true;
  }
  MessageWays::drop(receive.way);
  receive.way = {};
  return false;
}

void Messages::note_come(int peer, const Receive& receive) {
  if (reads_ == nullptr || carrier_to(peer) != nullptr) {
    return;  // there is no other way
  }
  const MessageWays::Time now = Deadline::Clock::now();
  Incoming& lane = incoming_[static_cast<std::size_t>(peer)];
  MessageWays::note(receive.way, lane.last_come, now);
  lane.last_come = now;
}

bool Messages::grant(int peer, Incoming& lane) {
  LaneCounters& counters = segment_.counters(peer, rank_);
  bool moved = false;
  while (lane.granted < std::min(lane.matched.size(), kLaneDepth) && may_grant(peer)) {
    const auto receive = lane.matched.begin() + static_cast<std::ptrdiff_t>(lane.granted);
    const bool is_taken = take(peer, *receive);
    const std::uint64_t ticket = counters.granted.load(std::memory_order_relaxed);
    segment_.rings(peer, rank_).grants[ticket % kLaneDepth] =
        receive->number | (is_taken ? kTaken : 0);
    counters.granted.store(ticket + 1, std::memory_order_release);
    doorbells_[static_cast<std::size_t>(peer)]->ring();
    if (is_taken) {
      OnDone on_done = std::move(receive->on_done);
      lane.matched.erase(receive);
      finish(on_done, peer);
    } else {
      if (MessageCarrier* const carrier = carrier_to(peer)) {
        carrier->send_grant(peer, ticket, receive->number);
      }
      ++lane.granted;
    }
    moved = true;
  }
  return moved;
}

bool Messages::move_in(int peer, Incoming& lane) {
  bool moved = false;
  while (lane.granted != 0 && lane.channel->until_received().holds()) {
    Receive& receive = lane.matched.front();
    const std::span<const std::byte> arrived = lane.channel->slot();
    const std::size_t bytes = std::min(segment_.channel(peer, rank_).slot_bytes,
                                       receive.buffer.bytes() - receive.moved_bytes);
    if (arrived.size() != bytes) {
      throw_damaged(peer,
                    join("has sent ", arrived.size(), " bytes of a message instead of ", bytes));
    }
    std::memcpy(static_cast<std::byte*>(receive.buffer.data) + receive.moved_bytes, arrived.data(),
                bytes);
    lane.channel->release();
    receive.moved_bytes += bytes;
    moved = true;
    if (receive.moved_bytes == receive.buffer.bytes()) {
      note_come(peer, receive);
      OnDone on_done = std::move(receive.on_done);
      lane.matched.pop_front();
      --lane.granted;
      finish(on_done, peer);
    }
  }
  return moved;
}

}  // namespace pydist
