#include "communicator/native/remote_ranks.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "communicator/departure.h"
#include "health/journal.h"
#include "topology/told_error.h"
#include "transport/shm_channel.h"
#include "transport/tcp/remote_channel.h"

namespace pydist {
namespace {

// A post travels without its first word, which is written last.
constexpr std::size_t kPostBytes = sizeof(Post) - sizeof(Counter);
constexpr std::size_t kPostFrameBytes = kPostBytes + sizeof(PostDetail);

constexpr std::chrono::nanoseconds kBetweenRefreshes = std::chrono::milliseconds(100);

std::byte* body_of(Post& post) noexcept {
  return reinterpret_cast<std::byte*>(&post) + sizeof(Counter);
}

void raise_to(Counter& counter, std::uint64_t value) noexcept {
  // One thread at a time writes it. Frames of several connections may overtake each other.
  if (counter.load(std::memory_order_relaxed) < value) {
    counter.store(value, std::memory_order_release);
  }
}

}  // namespace

RemoteRanks::RemoteRanks(int rank, const Placement& placement, std::uint64_t id, std::string token,
                         Endpoint& endpoint, GroupSegment segment, Lanes lanes,
                         std::vector<PeerPtr> peers)
    : rank_(rank),
      placement_(placement),
      id_(id),
      token_(std::move(token)),
      progress_(endpoint.progress()),
      node_(endpoint.network()),
      segment_(std::move(segment)),
      lanes_(std::move(lanes)),
      peers_(std::move(peers)),
      to_(peers_.size()),
      from_(peers_.size()),
      last_segments_(peers_.size()),
      has_transit_(peers_.size()) {
  for (std::vector<Arrivals>& of_set : arrivals_) {
    of_set.resize(peers_.size());
  }
  node_->add_sink(id_, *this);
}

void RemoteRanks::stop() noexcept {
  if (!has_stopped_.exchange(true)) {
    node_->remove_sink(id_);
    node_->no_longer_expect(token_);
  }
}

void RemoteRanks::release_buffers() {
  for (const PeerPtr& peer : peers_) {
    if (peer->link) {
      peer->link->release_segments(id_);
    }
  }
}

FrameHeader RemoteRanks::header_for(FrameKind kind, int receiver) const noexcept {
  FrameHeader header;
  header.kind = kind;
  header.group = id_;
  header.sender = rank_;
  header.receiver = receiver;
  return header;
}

void RemoteRanks::send_to_hosts(FrameHeader header, std::span<const std::byte> payload) {
  for (int host = 0; host < placement_.hosts(); ++host) {
    if (host != placement_.host_of(rank_)) {
      send_to_host(host, header, payload);
    }
  }
}

void RemoteRanks::send_to_host(int host, FrameHeader header, std::span<const std::byte> payload) {
  header.receiver = placement_.counterpart(rank_, host);
  if (link(header.receiver)->is_lost()) {
    for (const int other : placement_.ranks_on(host)) {
      header.receiver = link(other)->is_lost() ? header.receiver : other;
    }
  }
  link(header.receiver)->send(header, payload);
}

bool RemoteRanks::is_needed() const noexcept {
  const std::span<const int> ranks = placement_.ranks_on(placement_.host_of(rank_));
  return std::any_of(ranks.begin(), ranks.end(), [this](int rank) {
    return rank != rank_ && segment_.control(rank).has_left.load(std::memory_order_acquire) == 0 &&
           !peers_[static_cast<std::size_t>(rank)]->is_dead.load(std::memory_order_acquire);
  });
}

void RemoteRanks::send_eager(std::uint64_t round, std::size_t bytes) {
  FrameHeader header = header_for(FrameKind::kEager, 0);
  header.number = round;
  send_to_hosts(header, {segment_.transit(rank_, round), bytes});
}

void RemoteRanks::send_post(std::uint64_t sequence) {
  const std::size_t slot = sequence % kPostDepth;
  Post& post = segment_.control(rank_).posts[slot];
  const std::size_t counts =
      (post.flags & Post::kRagged) != 0 ? peers_.size() * sizeof(std::uint64_t) : 0;
  post_.resize(kPostFrameBytes + counts);
  std::memcpy(post_.data(), body_of(post), kPostBytes);
  std::memcpy(post_.data() + kPostBytes, &segment_.control(rank_).details[slot],
              sizeof(PostDetail));
  if (counts != 0) {
    std::memcpy(post_.data() + kPostFrameBytes, segment_.block_counts(rank_, slot), counts);
  }
  FrameHeader header = header_for(FrameKind::kPost, 0);
  header.number = sequence;
  send_to_hosts(header, post_);
}

std::size_t RemoteRanks::slot_bytes() const noexcept {
  return lanes_.collectives.channel(rank_, rank_).slot_bytes;
}

SendChannel& RemoteRanks::to(int rank) {
  std::unique_ptr<SendChannel>& channel = to_[static_cast<std::size_t>(rank)];
  if (!channel) {
    const ShmChannelMemory memory = lanes_.collectives.channel(rank_, rank);
    const auto reserve = [this, rank] { lanes_.collectives.reserve_lane(rank_, rank); };
    if (link(rank)) {
      FrameHeader header = header_for(FrameKind::kSegment, rank);
      header.lanes = static_cast<std::uint8_t>(LaneSet::kCollectives);
      channel = std::make_unique<RemoteSendChannel>(memory, header, link(rank), reserve);
    } else {
      reserve();
      channel = std::make_unique<ShmSendChannel>(memory, rank,
                                                 *peers_[static_cast<std::size_t>(rank)]->doorbell);
    }
  }
  return *channel;
}

ReceiveChannel& RemoteRanks::from(int rank) {
  std::unique_ptr<ReceiveChannel>& channel = from_[static_cast<std::size_t>(rank)];
  if (!channel) {
    const ShmChannelMemory memory = lanes_.collectives.channel(rank, rank_);
    if (link(rank)) {
      FrameHeader header = header_for(FrameKind::kReleased, rank);
      header.lanes = static_cast<std::uint8_t>(LaneSet::kCollectives);
      channel =
          std::make_unique<RemoteReceiveChannel>(memory, header, link(rank), progress_->doorbell());
    } else {
      channel = std::make_unique<ShmReceiveChannel>(
          memory, rank, *peers_[static_cast<std::size_t>(rank)]->doorbell);
    }
  }
  return *channel;
}

std::unique_ptr<SendChannel> RemoteRanks::make_sender(int peer) {
  return std::make_unique<RemoteSendChannel>(lanes_.messages.channel(rank_, peer),
                                             header_for(FrameKind::kSegment, peer), link(peer),
                                             nullptr);
}

std::unique_ptr<ReceiveChannel> RemoteRanks::make_receiver(int peer) {
  return std::make_unique<RemoteReceiveChannel>(lanes_.messages.channel(peer, rank_),
                                                header_for(FrameKind::kReleased, peer), link(peer),
                                                progress_->doorbell());
}

void RemoteRanks::send_announcement(int peer, std::uint64_t number,
                                    const Announcement& announcement) {
  FrameHeader header = header_for(FrameKind::kAnnounced, peer);
  header.number = number;
  link(peer)->send(header, std::as_bytes(std::span(&announcement, 1)));
}

void RemoteRanks::send_heard(int peer, std::uint64_t heard) {
  FrameHeader header = header_for(FrameKind::kHeard, peer);
  header.number = heard;
  link(peer)->send(header);
}

void RemoteRanks::send_grant(int peer, std::uint64_t number, std::uint64_t message) {
  FrameHeader header = header_for(FrameKind::kGranted, peer);
  header.number = number;
  header.extra = message;
  link(peer)->send(header);
}

void RemoteRanks::send_failure(const ErrorDescription& error) {
  const std::string text = ToldError{rank_, error}.to_text();
  send_to_hosts(header_for(FrameKind::kFailure, 0), std::as_bytes(std::span(text)));
}

void RemoteRanks::send_departure() {
  has_departed_.store(true);
  for (int host = 0; host < placement_.hosts(); ++host) {
    if (host != placement_.host_of(rank_)) {
      send_departure_to(host);
    }
  }
  for (int rank = 0; rank < placement_.size(); ++rank) {
    if (link(rank) && link(rank)->is_up()) {
      FrameHeader last = header_for(FrameKind::kLastSegment, rank);
      last.number = segments(rank_, rank);
      link(rank)->send(last);
    }
  }
}

void RemoteRanks::send_departure_to(int host) {
  const RankControl& control = segment_.control(rank_);
  FrameHeader header = header_for(FrameKind::kDeparture, 0);
  header.number = control.has_left.load(std::memory_order_relaxed);
  header.extra = control.farewell.load(std::memory_order_relaxed);
  send_to_host(host, header, {});
}

std::uint64_t RemoteRanks::segments(int sender, int receiver) const noexcept {
  return lanes_.messages.counters(sender, receiver).sent.load(std::memory_order_acquire) +
         lanes_.collectives.counters(sender, receiver).sent.load(std::memory_order_acquire);
}

bool RemoteRanks::may_send_more(int rank) const noexcept {
  const LinkPtr& its_link = link(rank);
  if (!its_link || !its_link->is_up()) {
    return false;
  }
  const std::uint64_t last =
      last_segments_[static_cast<std::size_t>(rank)].load(std::memory_order_acquire);
  return last == 0 || segments(rank, rank_) + 1 < last;
}

void RemoteRanks::refresh_pages() {
  const std::int64_t now = coarse_monotonic_ns();
  std::int64_t due = next_refresh_ns_.load(std::memory_order_relaxed);
  if (now < due ||
      !next_refresh_ns_.compare_exchange_strong(due, now + kBetweenRefreshes.count())) {
    return;
  }
  for (int rank = 0; rank < placement_.size(); ++rank) {
    if (link(rank)) {
      // A rank that this one is not connected to is asked for where this one has a connection.
      FrameHeader header = header_for(FrameKind::kPageRequest, 0);
      header.number = static_cast<std::uint64_t>(rank);
      send_to_host(placement_.host_of(rank), header, {});
    }
  }
}

void RemoteRanks::require(bool makes_sense, const FrameHeader& header) const {
  if (!makes_sense) {
    throw BadFrame(join("a frame of kind ", static_cast<int>(header.kind), " from rank ",
                        header.sender, " to rank ", header.receiver, " with number ", header.number,
                        " and ", header.bytes, " bytes."));
  }
}

void RemoteRanks::require_sender(const FrameHeader& header, std::uint64_t sender) const {
  const bool is_rank = header.sender >= 0 && header.sender < placement_.size();
  require(is_rank && link(header.sender) && link(header.sender)->number() == sender, header);
}

bool RemoteRanks::is_of_host_of(int rank, std::uint64_t process) const {
  if (rank < 0 || rank >= placement_.size()) {
    return false;
  }
  const std::span<const int> ranks = placement_.ranks_on(placement_.host_of(rank));
  return std::any_of(ranks.begin(), ranks.end(), [this, process](int each) {
    return link(each) && link(each)->number() == process;
  });
}

void RemoteRanks::reserve_lane_from(int sender, LaneSet set) {
  Arrivals& its = arrivals(sender, set);
  if (!its.is_reserved) {
    lanes(set).reserve_lane(sender, rank_);
    its.is_reserved = true;
  }
}

std::byte* RemoteRanks::place(const FrameHeader& header, std::uint64_t sender) {
  const auto counts = placement_.size() * sizeof(std::uint64_t);
  switch (header.kind) {
    case FrameKind::kPost:
      require_sender(header, sender);
      require(header.bytes == kPostFrameBytes || header.bytes == kPostFrameBytes + counts, header);
      return nullptr;
    case FrameKind::kEager: {
      require_sender(header, sender);
      require(header.bytes <= segment_.chunk_bytes(), header);
      const auto place = static_cast<std::size_t>(header.sender);
      if (!has_transit_[place]) {
        segment_.reserve_transit(header.sender);
        has_transit_[place] = true;
      }
      return segment_.transit(header.sender, header.number);
    }
    case FrameKind::kSegment: {
      require_sender(header, sender);
      require(header.receiver == rank_ && header.lanes <= 1, header);
      const auto set = static_cast<LaneSet>(header.lanes);
      const ShmChannelMemory lane = lanes(set).channel(header.sender, rank_);
      const std::uint64_t released = lane.released->load(std::memory_order_acquire);
      require(header.bytes <= lane.slot_bytes &&
                  header.number > lane.sent->load(std::memory_order_relaxed) &&
                  header.number <= released + lane.slot_count,
              header);
      reserve_lane_from(header.sender, set);
      return lane.slots + (header.number - 1) % lane.slot_count * lane.slot_bytes;
    }
    case FrameKind::kAnnounced:
      require_sender(header, sender);
      require(header.receiver == rank_ && header.bytes == sizeof(Announcement), header);
      return nullptr;
    case FrameKind::kReleased:
    case FrameKind::kHeard:
    case FrameKind::kGranted:
      require_sender(header, sender);
      require(header.receiver == rank_ && header.bytes == 0 && header.lanes <= 1, header);
      return nullptr;
    case FrameKind::kDeparture:
    case FrameKind::kLastSegment:
      require_sender(header, sender);
      require(header.bytes == 0, header);
      return nullptr;
    case FrameKind::kFailure:
      require_sender(header, sender);
      require(header.bytes <= sizeof(FailureRecord) * 2, header);
      return nullptr;
    case FrameKind::kPageRequest:
      require_sender(header, sender);
      require(header.number < peers_.size() && !link(static_cast<int>(header.number)) &&
                  header.bytes == 0,
              header);
      return nullptr;
    case FrameKind::kPage:
      require(is_of_host_of(header.sender, sender) && header.bytes == sizeof(ProcessPage), header);
      return nullptr;
    default:
      require(false, header);
      return nullptr;
  }
}

void RemoteRanks::take(const FrameHeader& header, const std::byte* payload,
                       std::uint64_t /*sender*/) {
  switch (header.kind) {
    case FrameKind::kPost:
      take_post(header, payload);
      ring_host();
      return;
    case FrameKind::kEager:
      return;  // its post follows
    case FrameKind::kSegment:
      take_segment(header);
      return;
    case FrameKind::kReleased:
      raise_to(*lanes(static_cast<LaneSet>(header.lanes)).channel(rank_, header.sender).released,
               header.number);
      progress_->doorbell().ring();
      return;
    case FrameKind::kAnnounced:
    case FrameKind::kHeard:
    case FrameKind::kGranted:
      take_message_news(header, payload);
      progress_->doorbell().ring();
      return;
    case FrameKind::kDeparture: {
      RankControl& control = segment_.control(header.sender);
      control.farewell.store(header.extra, std::memory_order_relaxed);
      control.has_left.store(static_cast<std::uint32_t>(header.number), std::memory_order_release);
      ring_host();
      return;
    }
    case FrameKind::kLastSegment:
      last_segments_[static_cast<std::size_t>(header.sender)].store(header.number + 1,
                                                                    std::memory_order_release);
      progress_->doorbell().ring();
      return;
    case FrameKind::kFailure: {
      const std::string text(reinterpret_cast<const char*>(payload), header.bytes);
      const ErrorDescription error = ToldError::from_text(text).error;
      segment_.failure().set(error.kind, error.message, rank_, error.blame);
      ring_host();
      return;
    }
    case FrameKind::kPageRequest:
      send_page(header);
      return;
    case FrameKind::kPage:
      take_page(header, payload);
      return;
    default:
      return;
  }
}

void RemoteRanks::take_post(const FrameHeader& header, const std::byte* payload) {
  const std::size_t slot = header.number % kPostDepth;
  RankControl& control = segment_.control(header.sender);
  Post& post = control.posts[slot];
  require(header.number > post.sequence.load(std::memory_order_relaxed), header);
  std::memcpy(body_of(post), payload, kPostBytes);
  std::memcpy(&control.details[slot], payload + kPostBytes, sizeof(PostDetail));
  if (header.bytes > kPostFrameBytes) {
    std::memcpy(segment_.block_counts(header.sender, slot), payload + kPostFrameBytes,
                header.bytes - kPostFrameBytes);
  }
  require(header.bytes > kPostFrameBytes || (post.flags & Post::kRagged) == 0, header);
  post.sequence.store(header.number, std::memory_order_release);
}

void RemoteRanks::take_segment(const FrameHeader& header) {
  const auto set = static_cast<LaneSet>(header.lanes);
  const ShmChannelMemory lane = lanes(set).channel(header.sender, rank_);
  Arrivals& its = arrivals(header.sender, set);
  const std::size_t slot = (header.number - 1) % lane.slot_count;
  require(!its.is_there[slot], header);
  its.is_there[slot] = true;
  lane.lengths[slot] = header.bytes;
  // Connections may overtake each other; the receiver takes segments in order.
  std::uint64_t arrived = lane.sent->load(std::memory_order_relaxed);
  while (std::exchange(its.is_there[arrived % lane.slot_count], false)) {
    ++arrived;
  }
  lane.sent->store(arrived, std::memory_order_release);
  progress_->doorbell().ring();
}

void RemoteRanks::take_message_news(const FrameHeader& header, const std::byte* payload) {
  const int peer = header.sender;
  if (header.kind == FrameKind::kHeard) {
    raise_to(lanes_.messages.counters(rank_, peer).heard, header.number);
    return;
  }
  if (header.kind == FrameKind::kGranted) {
    LaneCounters& counters = lanes_.messages.counters(rank_, peer);
    require(header.number == counters.granted.load(std::memory_order_relaxed), header);
    lanes_.messages.rings(rank_, peer).grants[header.number % kLaneDepth] = header.extra;
    counters.granted.store(header.number + 1, std::memory_order_release);
    return;
  }
  LaneCounters& counters = lanes_.messages.counters(peer, rank_);
  require(header.number == counters.announced.load(std::memory_order_relaxed) &&
              header.number < counters.heard.load(std::memory_order_relaxed) + kLaneDepth,
          header);
  reserve_lane_from(peer, LaneSet::kMessages);
  std::memcpy(&lanes_.messages.rings(peer, rank_).announcements[header.number % kLaneDepth],
              payload, sizeof(Announcement));
  counters.announced.store(header.number + 1, std::memory_order_release);
}

void RemoteRanks::send_page(const FrameHeader& request) {
  const std::vector<std::byte> copy = copy_of_page(*peers_[request.number]->page);
  FrameHeader header = header_for(FrameKind::kPage, request.sender);
  header.sender = static_cast<int>(request.number);
  header.number = static_cast<std::uint64_t>(monotonic_ns());
  link(request.sender)->send(header, copy);
}

void RemoteRanks::take_page(const FrameHeader& header, const std::byte* payload) {
  const Peer& peer = *peers_[static_cast<std::size_t>(header.sender)];
  // Each host's clock begins when it starts. Unsigned, since the number may be anything.
  const auto ahead =
      static_cast<std::int64_t>(static_cast<std::uint64_t>(monotonic_ns()) - header.number);
  write_page(*peer.mirror, {payload, header.bytes}, ahead);
}

void RemoteRanks::lose(std::uint64_t sender) {
  for (int rank = 0; rank < placement_.size(); ++rank) {
    const Peer& peer = *peers_[static_cast<std::size_t>(rank)];
    if (peer.link && peer.link->number() == sender && !peer.has_departed()) {
      // For the ranks of this host that have no connection to it.
      std::uint32_t none = 0;
      segment_.control(rank).has_left.compare_exchange_strong(
          none, static_cast<std::uint32_t>(Departure::kLost));
    }
  }
  ring_host();
  // It may have been the one by which its host was to hear of this rank.
  for (int host = 0; host < placement_.hosts(); ++host) {
    const LinkPtr& its = link(placement_.counterpart(rank_, host));
    if (!its || its->number() != sender) {
      continue;
    }
    if (segment_.failure().is_set()) {
      const ErrorDescription error = describe(segment_.failure().error());
      const std::string text = ToldError{rank_, error}.to_text();
      send_to_host(host, header_for(FrameKind::kFailure, 0), std::as_bytes(std::span(text)));
    }
    if (has_departed_.load()) {
      send_departure_to(host);
    }
  }
}

void RemoteRanks::ring_host() const noexcept {
  for (const int rank : placement_.ranks_on(placement_.host_of(rank_))) {
    peers_[static_cast<std::size_t>(rank)]->doorbell->ring();
  }
}

}  // namespace pydist
