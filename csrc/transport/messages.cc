#include "transport/messages.h"

#include <cstring>
#include <utility>

#include "base/error.h"
#include "health/doorbell.h"

namespace pydist {

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
    Pair& pair = pairs_.emplace_back();
    if (MessageCarrier* const carried = carrier_to(peer)) {
      out.channel = carried->make_sender(peer);
      in.channel = carried->make_receiver(peer);
    } else {
      pair = {segment_.ahead_pool(rank, peer), segment_.stream(rank, peer)};
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

std::optional<MessagePlace> Messages::place_at_once(int peer, const Buffer& buffer) noexcept {
  if (carrier_to(peer) != nullptr || !is_idle() ||
      !outgoing_[static_cast<std::size_t>(peer)].is_reserved || !may_announce(peer)) {
    return std::nullopt;
  }
  const MessagePlace place = place_of(peer, buffer);
  return place.in == MessagePlace::In::kAhead || rides_along(rank_, peer, buffer)
             ? std::optional(place)
             : std::nullopt;
}

void Messages::send_at_once(int peer, std::uint64_t tag, const Buffer& buffer,
                            const MessagePlace& place) noexcept {
  publish(peer, segment_.counters(rank_, peer).announced.load(std::memory_order_relaxed), tag,
          buffer, place);
}

Messages::AtOnce Messages::try_receive(int peer, std::uint64_t tag, const Buffer& buffer,
                                       unsigned looks) {
  if (carrier_to(peer) != nullptr || !is_idle() || !unexpected_.empty()) {
    return AtOnce::kNever;
  }
  const bool rides = rides_along(peer, rank_, buffer);
  if (!rides && buffer.bytes() > pair_with(peer).ahead.most_bytes()) {
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
  if (announcement.riding_bytes != (rides ? buffer.bytes() : 0)) {
    return AtOnce::kNever;  // match() says what is wrong
  }
  if (!rides) {
    if (announcement.in != MessagePlace::In::kAhead) {
      return AtOnce::kNever;
    }
    require_blocks(peer, announcement, buffer);
    Receive receive{.peer = peer, .tag = tag, .buffer = buffer, .on_done = nullptr};
    receive.place = {announcement.in, announcement.address};
    std::size_t before = 0;
    for (unsigned look = 0; !copy_ahead(peer, receive); ++look) {
      if (std::exchange(before, receive.moved_bytes) != receive.moved_bytes) {
        look = 0;
      } else if (look >= looks) {
        return AtOnce::kNever;
      }
      spin_pause();
    }
  } else if (buffer.count != 0) {
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
    if (!in.ahead.empty()) {
      moved = move_ahead(peer, in) || moved;
    }
  }
  return moved;
}

void Messages::finish(OnDone& on_done, int peer) {
  --pending_;
  on_done(peer);
}

void Messages::throw_damaged(int peer, const std::string& what) {
  throw Error(ErrorKind::kError,
              join("Rank ", peer, " ", what,
                   ": its shared memory has been damaged. Look for "
                   "writes out of bounds in that process."),
              Blame{.ranks = {peer}, .cause = "its shared memory is damaged"});
}

}  // namespace pydist
