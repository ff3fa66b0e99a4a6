// What a rank does with the messages that it receives, see messages.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <utility>

#include "base/error.h"
#include "health/doorbell.h"
#include "transport/block_pool.h"
#include "transport/messages.h"
#include "tuning/tuning_class.h"

namespace pydist {

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
    if (heard.announcement.in > MessagePlace::In::kAhead) {
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

void Messages::require_blocks(int peer, const Announcement& announcement, const Buffer& buffer) {
  if (carrier_to(peer) != nullptr ||
      !pair_with(peer).ahead.may_hold(announcement.address, buffer.bytes())) {
    throw_damaged(peer,
                  join("has filled the wrong blocks with a message of ", buffer.bytes(), " bytes"));
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
  if (!has_come && announcement.in == MessagePlace::In::kAhead) {
    require_blocks(peer, announcement, receive->buffer);
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
  Incoming& lane = incoming_[static_cast<std::size_t>(peer)];
  if (announcement.in == MessagePlace::In::kAhead) {
    lane.ahead.push_back(std::move(matched));
  } else {
    matched.do_both_send =
        std::exchange(outgoing_[static_cast<std::size_t>(peer)].has_announced, false);
    lane.matched.push_back(std::move(matched));
  }
  return true;
}

bool Messages::may_grant(int peer) const noexcept {
  const LaneCounters& counters = segment_.counters(peer, rank_);
  // Between hosts a grant whose data has come is done with, since data follows in their order.
  return carrier_to(peer) != nullptr || counters.granted.load(std::memory_order_relaxed) -
                                                counters.obeyed.load(std::memory_order_acquire) <
                                            kLaneDepth;
}

MessageWays::Way Messages::choose_way(int peer, const Receive& receive, MessageWays::Time begin) {
  const std::size_t bytes = receive.buffer.bytes();
  const MessagePlace::In in = receive.place.in;
  if (in == MessagePlace::In::kSharedHeap) {
    return ways_.choose(bytes, TunedMemory::kShared, receive.do_both_send, begin);
  }
  if (bytes > pair_with(peer).ahead.most_bytes()) {
    return ways_.choose(bytes, TunedMemory::kOrdinary, receive.do_both_send, begin);
  }
  if (bytes <= kLongestNeverRead) {
    // It would have come ahead, if there had been a block.
    return ways_.choose(bytes, TunedMemory::kOrdinary, /*do_both_send=*/false, begin);
  }
  // Of these the sender decides, so one class has all that it can be told of at a time.
  const MessageWays::Way way = ways_.choose(
      bytes, TunedMemory::kOrdinary, /*do_both_send=*/false, begin,
      in == MessagePlace::In::kAhead ? MessageWays::Came::kAhead : MessageWays::Came::kNotAhead);
  LaneCounters& counters = segment_.counters(peer, rank_);
  if (is_to_be_read(counters, bytes) != way.is_next_read()) {
    counters.reads.store(counters.reads.load(std::memory_order_relaxed) ^ bit_of_reads(bytes),
                         std::memory_order_relaxed);
  }
  return way;
}

bool Messages::take(int peer, Receive& receive) {
  if (receive.place.in == MessagePlace::In::kNowhere || reads_ == nullptr ||
      carrier_to(peer) != nullptr) {
    return false;
  }
  receive.way = choose_way(peer, receive, Deadline::Clock::now());
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

std::size_t Messages::receive_piece(int peer, Incoming& lane, std::byte* target, std::size_t left) {
  const auto require_length = [peer](std::size_t arrived, std::size_t expected) {
    if (arrived != expected) {
      throw_damaged(peer, join("has sent ", arrived, " bytes of a message instead of ", expected));
    }
  };
  if (lane.channel != nullptr) {
    if (!lane.channel->until_received().holds()) {
      return 0;
    }
    const std::span<const std::byte> arrived = lane.channel->slot();
    require_length(arrived.size(), std::min(segment_.channel(peer, rank_).slot_bytes, left));
    std::memcpy(target, arrived.data(), arrived.size());
    lane.channel->release();
    return arrived.size();
  }
  BlockStream& stream = pair_with(peer).stream;
  const std::optional<BlockStream::Piece> piece = stream.next();
  if (!piece) {
    return 0;
  }
  require_length(piece->bytes, std::min(stream.piece_bytes(), left));
  if (!stream.receive(*piece, target)) {
    throw_damaged(peer, "has sent a piece of a message in the wrong block");
  }
  doorbells_[static_cast<std::size_t>(peer)]->ring();
  return piece->bytes;
}

bool Messages::move_in(int peer, Incoming& lane) {
  bool moved = false;
  while (lane.granted != 0) {
    Receive& receive = lane.matched.front();
    const std::size_t bytes = receive_piece(
        peer, lane, static_cast<std::byte*>(receive.buffer.data) + receive.moved_bytes,
        receive.buffer.bytes() - receive.moved_bytes);
    if (bytes == 0) {
      break;
    }
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

bool Messages::copy_ahead(int peer, Receive& receive) {
  const Buffer& buffer = receive.buffer;
  const BlockSet blocks = receive.place.address;
  const bool is_timed =
      buffer.bytes() > kLongestNeverRead && reads_ != nullptr && reads_->may_read_processes();
  if (is_timed && receive.begin == MessageWays::Time()) {
    receive.begin = Deadline::Clock::now();
  }
  BlockPool& pool = pair_with(peer).ahead;
  receive.moved_bytes =
      pool.copy(blocks, static_cast<std::byte*>(buffer.data), buffer.bytes(), receive.moved_bytes);
  if (receive.moved_bytes != buffer.bytes()) {
    return false;
  }
  pool.empty(blocks);
  if (is_timed) {
    const MessageWays::Time now = Deadline::Clock::now();
    const MessageWays::Way way = choose_way(peer, receive, receive.begin);
    // Its sender has copied as much; a read would have saved it that.
    MessageWays::note(way, {}, now + (now - receive.begin));
  }
  return true;
}

bool Messages::move_ahead(int peer, Incoming& lane) {
  bool moved = false;
  while (!lane.ahead.empty()) {
    Receive& receive = lane.ahead.front();
    const std::size_t before = receive.moved_bytes;
    const bool is_done = copy_ahead(peer, receive);
    moved = moved || receive.moved_bytes != before;
    if (!is_done) {
      break;
    }
    OnDone on_done = std::move(receive.on_done);
    lane.ahead.pop_front();
    finish(on_done, peer);
  }
  return moved;
}

}  // namespace pydist
