#include "communicator/peers/remote_ranks.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "base/log.h"
#include "communicator/departure.h"
#include "communicator/peers/post_records.h"
#include "health/journal.h"
#include "topology/told_error.h"
#include "transport/shm_channel.h"
#include "transport/tcp/remote_channel.h"

namespace pydist {
namespace {

// Posts go into one frame up to here, far below what a frame may hold.
constexpr std::size_t kEnoughPosts = std::size_t{1} << 20;

constexpr std::chrono::nanoseconds kBetweenRefreshes = std::chrono::milliseconds(100);
// How long a rank that leaves waits for connections by which something is to go: as long as a
// process may take to answer, or less where it does not listen any more.
constexpr std::chrono::seconds kDialPatience{10};
constexpr std::chrono::seconds kRefusedPatience{1};
constexpr std::chrono::milliseconds kDialLook{1};

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
      targets_(peers_.size()),
      last_segments_(peers_.size()),
      has_transit_(peers_.size()) {
  for (int host = 0; host < placement_.hosts(); ++host) {
    if (host != placement_.host_of(rank_)) {
      other_hosts_.push_back(host);
    }
  }
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
  for (SegmentTargets& targets : targets_) {
    targets.close();
  }
  node_->drop(*this, FrameKind::kSegment);
}

void RemoteRanks::send_to_any_on(int host, FrameHeader header, std::span<const std::byte> payload) {
  header.receiver = placement_.counterpart(rank_, host);
  for (const int other : placement_.ranks_on(host)) {
    const bool is_better = link(header.receiver)->is_lost() && !link(other)->is_lost();
    header.receiver = is_better ? other : header.receiver;
  }
  link(header.receiver)->send(header, payload);
}

void RemoteRanks::spread(FrameHeader header, std::span<const std::byte> payload) {
  for (const int host : other_hosts_) {
    send_to_any_on(host, header, payload);
    for (const int rank : placement_.ranks_on(host)) {
      if (link(rank)->is_up() && rank != placement_.counterpart(rank_, host)) {
        header.receiver = rank;
        link(rank)->send(header, payload);
      }
    }
  }
}

bool RemoteRanks::is_needed() const noexcept {
  const std::span<const int> ranks = placement_.ranks_on(placement_.host_of(rank_));
  return std::any_of(ranks.begin(), ranks.end(), [this](int rank) {
    return rank != rank_ && segment_.control(rank).has_left.load(std::memory_order_acquire) == 0 &&
           !peers_[static_cast<std::size_t>(rank)]->is_dead.load(std::memory_order_acquire);
  });
}

void RemoteRanks::send_post(std::uint64_t sequence, std::uint64_t round) {
  gather_frames({&rank_, 1}, sequence, round);
  for (const int host : other_hosts_) {
    send_frames_to(placement_.counterpart(rank_, host));
  }
}

void RemoteRanks::send_posts(std::span<const int> ranks, int receiver, std::uint64_t sequence,
                             std::uint64_t round, std::span<const std::byte> deposit) {
  gather_frames(ranks, sequence, round);
  if (!deposit.empty()) {
    frames_.insert(frames_.begin(), {header_for(FrameKind::kDeposit, 0), deposit});
    frames_.front().header.number = round;
  }
  send_frames_to(receiver);
}

void RemoteRanks::send_deposit(int receiver, std::uint64_t round, std::span<const std::byte> data) {
  FrameHeader header = header_for(FrameKind::kDeposit, receiver);
  header.number = round;
  link(receiver)->send(header, data);
}

void RemoteRanks::gather_frames(std::span<const int> ranks, std::uint64_t sequence,
                                std::uint64_t round) {
  const std::size_t slot = sequence % kPostDepth;
  post_.clear();
  frames_.clear();
  std::vector<std::size_t> ends;  // of what each frame brings, in post_
  for (const int rank : ranks) {
    if (post_.size() - (ends.empty() ? 0 : ends.back()) > kEnoughPosts) {
      ends.push_back(post_.size());
    }
    append_post(post_, segment_, rank, slot, peers_.size());
    const std::size_t eager_bytes = std::min<std::size_t>(
        segment_.control(rank).details[slot].eager_bytes, segment_.chunk_bytes());
    if (eager_bytes != 0) {
      frames_.push_back(
          {header_for(FrameKind::kEager, 0), {segment_.transit(rank, round), eager_bytes}});
      frames_.back().header.number = round;
      frames_.back().header.extra = static_cast<std::uint64_t>(rank);
    }
  }
  ends.push_back(post_.size());
  for (std::size_t begin = 0; const std::size_t end : ends) {
    frames_.push_back(
        {header_for(FrameKind::kPost, 0), std::span(post_).subspan(begin, end - begin)});
    frames_.back().header.number = sequence;
    begin = end;
  }
}

void RemoteRanks::send_frames_to(int receiver) {
  // No other rank in the receiver's place: what belongs together has to take one way.
  for (Frame& frame : frames_) {
    frame.header.receiver = receiver;
  }
  link(receiver)->send(frames_);
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
          std::make_unique<RemoteReceiveChannel>(memory, header, link(rank), progress_->doorbell(),
                                                 &targets_[static_cast<std::size_t>(rank)]);
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
                                                progress_->doorbell(), /*targets=*/nullptr);
}

void RemoteRanks::send_announcement(int peer, std::uint64_t number,
                                    std::span<const std::byte> announcement) {
  FrameHeader header = header_for(FrameKind::kAnnounced, peer);
  header.number = number;
  link(peer)->send(header, announcement);
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
  has_passed_failure_on_.store(true);
  const std::string text = ToldError{rank_, error}.to_text();
  spread(header_for(FrameKind::kFailure, 0), std::as_bytes(std::span(text)));
}

void RemoteRanks::pass_failure_on() {
  if (segment_.failure().is_set() && !has_passed_failure_on_.exchange(true)) {
    send_failure(describe(segment_.failure().error()));
  }
}

void RemoteRanks::send_departure() {
  await_dialled();
  has_departed_.store(true);
  tell_departure();
  for (int rank = 0; rank < placement_.size(); ++rank) {
    if (link(rank)) {
      FrameHeader last = header_for(FrameKind::kLastSegment, rank);
      last.number = segments(rank_, rank);
      link(rank)->send_once_up(last);
    }
  }
}

// A small message is sent, as far as its sender is concerned, once it waits for its connection.
void RemoteRanks::await_dialled() const {
  const Deadline patience = Deadline::in(kDialPatience);
  const Deadline refused = Deadline::in(kRefusedPatience);
  const auto is_hopeless = [&](const Link& link) {
    return patience.has_passed() || (refused.has_passed() && !node_->hindrance(link).empty());
  };
  for (const PeerPtr& peer : peers_) {
    const LinkPtr& its_link = peer->link;
    while (its_link && !its_link->is_up() && !its_link->is_lost() && its_link->has_to_send() &&
           !segment_.failure().is_set() && !is_hopeless(*its_link)) {
      std::this_thread::sleep_for(kDialLook);
    }
  }
}

void RemoteRanks::tell_departure() {
  const RankControl& control = segment_.control(rank_);
  FrameHeader header = header_for(FrameKind::kDeparture, 0);
  header.number = control.has_left.load(std::memory_order_relaxed);
  header.extra = control.farewell.load(std::memory_order_relaxed);
  for (const int host : other_hosts_) {
    std::vector<std::byte> awaits_last_segment;
    for (const int rank : placement_.ranks_on(host)) {
      awaits_last_segment.push_back(std::byte{link(rank)->is_up()});
    }
    // The way that this rank's posts have gone, where it sends them directly: another one might be
    // quicker, and the ranks there would take the rank for gone before they see what it has done.
    send_to_any_on(host, header, awaits_last_segment);
  }
}

std::uint64_t RemoteRanks::segments(int sender, int receiver) const noexcept {
  return lanes_.messages.counters(sender, receiver).sent.load(std::memory_order_acquire) +
         lanes_.collectives.counters(sender, receiver).sent.load(std::memory_order_acquire);
}

bool RemoteRanks::may_send_more(int rank) const noexcept {
  if (link(rank)->is_lost()) {
    return false;
  }
  const std::uint64_t last =
      last_segments_[static_cast<std::size_t>(rank)].load(std::memory_order_acquire);
  if (last != 0) {
    return segments(rank, rank_) + 1 < last;
  }
  // The rank may have made a connection that stands only at its end so far.
  return link(rank)->is_up() ||
         lanes_.messages.counters(rank, rank_).awaits_last_segment.load() != 0;
}

bool RemoteRanks::speaks_for(int rank) const noexcept {
  const int counterpart = placement_.counterpart(rank, placement_.host_of(rank_));
  return counterpart == rank_ ||
         peers_[static_cast<std::size_t>(counterpart)]->is_dead.load(std::memory_order_acquire);
}

bool RemoteRanks::is_gone(int rank) const noexcept {
  if (segment_.control(rank).has_left.load(std::memory_order_acquire) != 0) {
    return !may_send_more(rank);
  }
  return speaks_for(rank) && link(rank)->is_lost();
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
      send_to_any_on(placement_.host_of(rank), header);
    }
  }
}

void RemoteRanks::lose(std::uint64_t sender) {
  for (int rank = 0; rank < placement_.size(); ++rank) {
    const Peer& peer = *peers_[static_cast<std::size_t>(rank)];
    if (peer.link && peer.link->number() == sender && (!peer.has_departed() || speaks_for(rank))) {
      // For the ranks of this host that have no connection to it.
      std::uint32_t none = 0;
      segment_.control(rank).has_left.compare_exchange_strong(
          none, static_cast<std::uint32_t>(peer.has_departed() ? Departure::kProgramEnd
                                                               : Departure::kLost));
    }
  }
  ring_host();
  // It may have been the one by which its host was to hear of this rank.
  if (segment_.failure().is_set()) {
    send_failure(describe(segment_.failure().error()));
  }
  if (has_departed_.load()) {
    tell_departure();
  }
}

void RemoteRanks::ring_host() const noexcept {
  for (const int rank : placement_.ranks_on(placement_.host_of(rank_))) {
    peers_[static_cast<std::size_t>(rank)]->doorbell->ring();
  }
}

}  // namespace pydist
