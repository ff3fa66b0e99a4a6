// What a rank does with the messages that it sends, see messages.h.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "health/doorbell.h"
#include "transport/block_pool.h"
#include "transport/messages.h"

namespace pydist {

bool Messages::may_announce(int peer) const noexcept {
  const LaneCounters& counters = segment_.counters(rank_, peer);
  return counters.announced.load(std::memory_order_relaxed) -
             counters.heard.load(std::memory_order_acquire) <
         kLaneDepth;
}

MessagePlace Messages::place_of(int peer, const Buffer& buffer) noexcept {
  if (rides_along(rank_, peer, buffer) || carrier_to(peer) != nullptr) {
    return {};
  }
  const std::size_t bytes = buffer.bytes();
  const MessagePlace own = reads_ != nullptr ? reads_->place_of(peer, buffer) : MessagePlace{};
  const bool is_better_read = own.in == MessagePlace::In::kSharedHeap ||
                              (own.in == MessagePlace::In::kProcess &&
                               is_to_be_read(segment_.counters(rank_, peer), bytes));
  BlockPool& pool = pair_with(peer).ahead;
  if (bytes > pool.most_bytes() || (bytes > kLongestNeverRead && is_better_read)) {
    return own;
  }
  const BlockSet blocks = pool.find(bytes);
  return blocks != 0 ? MessagePlace{MessagePlace::In::kAhead, blocks} : own;
}

void Messages::publish(int peer, std::uint64_t number, std::uint64_t tag, const Buffer& buffer,
                       const MessagePlace& place) {
  Announcement& announcement = segment_.announcement(rank_, peer, number);
  announcement.tag = tag;
  announcement.count = buffer.count;
  announcement.address = place.address;
  announcement.dtype = buffer.dtype;
  announcement.in = place.in;
  announcement.riding_bytes = 0;
  if (buffer.count != 0 && rides_along(rank_, peer, buffer)) {
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
  if (place.in == MessagePlace::In::kAhead) {
    pair_with(peer).ahead.fill(place.address, static_cast<const std::byte*>(buffer.data),
                               buffer.bytes());
    doorbells_[static_cast<std::size_t>(peer)]->ring();
  }
}

bool Messages::announce(int peer, Outgoing& lane) {
  bool moved = false;
  while (!lane.unannounced.empty() && may_announce(peer)) {
    Send send = std::move(lane.unannounced.front());
    lane.unannounced.pop_front();
    send.number = segment_.counters(rank_, peer).announced.load(std::memory_order_relaxed);
    const MessagePlace place = place_of(peer, send.buffer);
    publish(peer, send.number, send.tag, send.buffer, place);
    send.in = place.in;
    moved = true;
    if (rides_along(rank_, peer, send.buffer) || send.in == MessagePlace::In::kAhead) {
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
  SendChannel* const channel = lane.channel.get();
  BlockStream& stream = pair_with(peer).stream;
  while (!lane.granted.empty() &&
         (channel != nullptr ? channel->until_free().holds() : stream.may_send())) {
    Send& send = lane.granted.front();
    const std::byte* const data =
        static_cast<const std::byte*>(send.buffer.data) + send.moved_bytes;
    const std::size_t left = send.buffer.bytes() - send.moved_bytes;
    std::size_t bytes = 0;
    if (channel != nullptr) {
      bytes = std::min(channel->slot_bytes(), left);
      std::memcpy(channel->slot(), data, bytes);
      channel->send(bytes);
    } else {
      bytes = std::min(stream.piece_bytes(), left);
      stream.send(data, bytes);
      doorbells_[static_cast<std::size_t>(peer)]->ring();
    }
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

}  // namespace pydist
