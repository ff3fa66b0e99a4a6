// What RemoteRanks does with the frames that come from other hosts: whether they make sense, where
// they go, and who is woken.

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "communicator/peers/post_records.h"
#include "communicator/peers/remote_ranks.h"
#include "health/journal.h"
#include "topology/told_error.h"
#include "transport/shm_channel.h"

namespace pydist {
namespace {

// Whether it announces an operation, or brings what goes ahead of one.
bool is_of_operation(FrameKind kind) noexcept {
  return kind == FrameKind::kPost || kind == FrameKind::kEager || kind == FrameKind::kDeposit;
}

void raise_to(Counter& counter, std::uint64_t value) noexcept {
  // One thread at a time writes it. Frames of several connections may overtake each other.
  if (counter.load(std::memory_order_relaxed) < value) {
    counter.store(value, std::memory_order_release);
  }
}

}  // namespace

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
  try {
    return place_checked(header, sender);
  } catch (const BadFrame&) {
    throw;
  } catch (const std::exception& error) {
    // This rank has no memory for it: no fault of the sender's, nor of the connection.
    const Peer& own = *peers_[static_cast<std::size_t>(rank_)];
    const ErrorDescription what{
        ErrorKind::kTransport, join("rank ", rank_, " (", own.description, "): ", error.what()),
        Blame{.ranks = {rank_}, .host = own.host, .pid = own.pid, .cause = error.what()}};
    if (segment_.failure().set(what.kind, what.message, rank_, what.blame)) {
      send_failure(describe(segment_.failure().error()));
    }
    ring_host();
    return nullptr;
  }
}

std::byte* RemoteRanks::place_checked(const FrameHeader& header, std::uint64_t sender) {
  switch (header.kind) {
    case FrameKind::kPost:
      require_sender(header, sender);
      require(header.bytes <= most_record_bytes(peers_.size()), header);
      return nullptr;
    case FrameKind::kEager: {
      require_sender(header, sender);
      const auto rank = static_cast<int>(std::min(header.extra, peers_.size()));
      require(rank < placement_.size() && link(rank), header);
      return place_of_deposit(header, rank);
    }
    case FrameKind::kDeposit:
      require_sender(header, sender);
      return place_of_deposit(header, header.sender);
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
      std::byte* const target =
          set == LaneSet::kCollectives
              ? targets_[static_cast<std::size_t>(header.sender)].place(header.number, header.bytes)
              : nullptr;
      return target != nullptr
                 ? target
                 : lane.slots + (header.number - 1) % lane.slot_count * lane.slot_bytes;
    }
    case FrameKind::kAnnounced:
      require_sender(header, sender);
      require(header.receiver == rank_ && header.bytes >= sizeof(Announcement) &&
                  header.bytes - sizeof(Announcement) <=
                      lanes_.messages.most_riding_bytes(header.sender, rank_),
              header);
      return nullptr;
    case FrameKind::kReleased:
    case FrameKind::kHeard:
    case FrameKind::kGranted:
      require_sender(header, sender);
      require(header.receiver == rank_ && header.bytes == 0 && header.lanes <= 1, header);
      return nullptr;
    case FrameKind::kDeparture:
      require_sender(header, sender);
      require(header.bytes == placement_.ranks_on(placement_.host_of(rank_)).size(), header);
      return nullptr;
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
  if (segment_.failure().is_set() && is_of_operation(header.kind)) {
    return;  // there may have been no memory for it, and nobody waits for it any more
  }
  switch (header.kind) {
    case FrameKind::kPost:
      take_posts(header, payload);
      ring_host();
      return;
    case FrameKind::kEager:
      note_arrival(header, static_cast<int>(header.extra));
      return;  // its post follows
    case FrameKind::kDeposit:
      note_arrival(header, header.sender);
      raise_to(segment_.control(header.sender).deposited, header.number + 1);
      ring_host();
      return;
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
      for (const int rank : placement_.ranks_on(placement_.host_of(rank_))) {
        lanes_.messages.counters(header.sender, rank)
            .awaits_last_segment.store(static_cast<std::uint32_t>(*payload++));
      }
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

std::byte* RemoteRanks::place_of_deposit(const FrameHeader& header, int rank) {
  require(header.bytes <= segment_.chunk_bytes(), header);
  const auto place = static_cast<std::size_t>(rank);
  if (!has_transit_[place]) {
    segment_.reserve_transit(rank);
    has_transit_[place] = true;
  }
  return segment_.transit(rank, header.number);
}

void RemoteRanks::note_arrival(const FrameHeader& header, int rank) {
  segment_.control(rank).arrivals[header.number % kTransitSlots] = {header.number, header.bytes};
  if (header.kind == FrameKind::kEager) {
    eager_bytes_[{header.sender, rank}] = header.bytes;
  }
}

void RemoteRanks::take_posts(const FrameHeader& header, const std::byte* payload) {
  std::span<const std::byte> records(payload, header.bytes);
  require(!records.empty(), header);
  while (!records.empty()) {
    const PostRecord record = take_record(records, peers_.size());
    const Counter& last = segment_.control(record.rank).posts[header.number % kPostDepth].sequence;
    require(link(record.rank) && header.number > last.load(std::memory_order_relaxed), header);
    PostDetail detail;
    std::memcpy(&detail, record.detail.data(), sizeof detail);
    // What goes ahead of a post has come before it, or ranks would look where nothing is. Both come
    // from one sender: a rank's next post may take another way, and come in between.
    const auto eager = eager_bytes_.find({header.sender, record.rank});
    const std::uint64_t has_come =
        eager == eager_bytes_.end() ? 0 : std::exchange(eager->second, 0);
    require(detail.eager_bytes == has_come, header);
    write_post(record, segment_, header.number);
  }
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
    require(header.number == counters.granted.load(std::memory_order_relaxed) &&
                (header.extra & kTaken) == 0,
            header);
    lanes_.messages.rings(rank_, peer).grants[header.number % kLaneDepth] = header.extra;
    counters.granted.store(header.number + 1, std::memory_order_release);
    return;
  }
  LaneCounters& counters = lanes_.messages.counters(peer, rank_);
  require(header.number == counters.announced.load(std::memory_order_relaxed) &&
              header.number < counters.heard.load(std::memory_order_acquire) + kLaneDepth,
          header);
  Announcement announcement;
  std::memcpy(&announcement, payload, sizeof announcement);
  require(header.bytes == sizeof announcement + announcement.riding_bytes, header);
  reserve_lane_from(peer, LaneSet::kMessages);
  std::memcpy(static_cast<void*>(&lanes_.messages.announcement(peer, rank_, header.number)),
              payload, header.bytes);
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

}  // namespace pydist
