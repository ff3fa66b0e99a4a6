// What a group has to do with its ranks on other hosts: carries what this rank publishes to them,
// and writes what they publish into the memory of this host, where everybody who waits looks.
//
// Note [Counterparts]
// Each host has memory of its own for the group, in which the ranks of the other hosts have their
// places, too. What a rank publishes for all (posts, its departure, an error) it sends to one rank
// of each other host, its counterpart there, which writes it into its host's memory and wakes the
// others; or, of posts, in rounds to some, which pass it on (between_hosts/announcing.h). So hosts
// that have as many ranks as each other share the work evenly. What is for one rank alone
// (segments, messages) goes to that one.
//
// A rank that has let go of the group goes on to do so for the ranks of its host that have not,
// until its process ends; then another one takes its place.
//
// Thread safe, but for the channels and what is sent, which are for whoever drives the group's
// operations, as in Group.

#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "collectives/between_hosts/channels.h"
#include "collectives/group.h"
#include "communicator/peers/endpoint.h"
#include "topology/placement.h"
#include "transport/lane_segment.h"
#include "transport/messages.h"
#include "transport/tcp/segment_targets.h"
#include "transport/tcp/tcp_node.h"

namespace pydist {

class RemoteRanks final : public Announcer,
                          public Channels,
                          public MessageCarrier,
                          private FrameSink {
 public:
  struct Lanes {
    LaneSegment messages;
    LaneSegment collectives;
  };

  // `id`: of the group, the same on every rank and unlike any other's. `token`: by which the ranks
  // of the group may connect, until it ends.
  RemoteRanks(int rank, const Placement& placement, std::uint64_t id, std::string token,
              Endpoint& endpoint, GroupSegment segment, Lanes lanes, std::vector<PeerPtr> peers);
  ~RemoteRanks() override { stop(); }

  [[nodiscard]] const Placement& placement() const noexcept { return placement_; }

  // From now on nothing comes in. Idempotent.
  void stop() noexcept;
  // Whether another rank of this host may still need what comes in here.
  [[nodiscard]] bool is_needed() const noexcept;
  // The buffers of operations under way may go: what has not been sent of them is not needed, and
  // nothing more is written into them. For good: the group has failed, or this rank leaves it.
  void release_buffers();

  // -- Announcer --------------------------------------------------------------------------------
  void send_post(std::uint64_t sequence, std::uint64_t round) override;
  void send_posts(std::span<const int> ranks, int receiver, std::uint64_t sequence,
                  std::uint64_t round, std::span<const std::byte> deposit) override;
  void send_deposit(int receiver, std::uint64_t round, std::span<const std::byte> data) override;

  // -- Channels ---------------------------------------------------------------------------------
  [[nodiscard]] std::size_t slot_bytes() const noexcept override {
    return lanes_.collectives.slot_bytes();
  }
  [[nodiscard]] std::size_t slot_bytes_on_host() const noexcept override {
    return lanes_.collectives.slot_bytes_inside();
  }
  [[nodiscard]] std::size_t window() const noexcept override { return lanes_.collectives.window(); }
  [[nodiscard]] SendChannel& to(int rank) override;
  [[nodiscard]] ReceiveChannel& from(int rank) override;

  // -- MessageCarrier ---------------------------------------------------------------------------
  [[nodiscard]] bool reaches(int peer) const noexcept override { return link(peer) != nullptr; }
  [[nodiscard]] std::unique_ptr<SendChannel> make_sender(int peer) override;
  [[nodiscard]] std::unique_ptr<ReceiveChannel> make_receiver(int peer) override;
  void send_announcement(int peer, std::uint64_t number,
                         std::span<const std::byte> announcement) override;
  void send_heard(int peer, std::uint64_t heard) override;
  void send_grant(int peer, std::uint64_t number, std::uint64_t message) override;

  // -- news of the group ------------------------------------------------------------------------
  // Each rank that learns of the group's error passes it on, once: the one that told it may be
  // connected to none that runs.
  void send_failure(const ErrorDescription& error);
  void pass_failure_on();
  // What control(rank) says of this rank's departure.
  void send_departure();
  // Whether nothing more comes from a rank of another host, which has left or has ended. What it
  // has sent to this rank, and what it has published, may take longer than the news that it is
  // gone.
  [[nodiscard]] bool is_gone(int rank) const noexcept;
  // Asks, now and then, for the pages of the ranks on other hosts (ProcessPage), which then come to
  // their peers' mirrors.
  void refresh_pages();

 private:
  // Of the segments that have arrived from one rank in one set of lanes; the server's.
  struct Arrivals {
    std::array<bool, kMostLaneSlots> is_there{};
    bool is_reserved = false;
  };

  [[nodiscard]] std::byte* place(const FrameHeader& header, std::uint64_t sender) override;
  void take(const FrameHeader& header, const std::byte* payload, std::uint64_t sender) override;
  void lose(std::uint64_t sender) override;
  // place(), but throws where there is no memory.
  [[nodiscard]] std::byte* place_checked(const FrameHeader& header, std::uint64_t sender);

  [[nodiscard]] const LinkPtr& link(int rank) const noexcept {
    return peers_[static_cast<std::size_t>(rank)]->link;
  }
  [[nodiscard]] FrameHeader header_for(FrameKind kind, int receiver) const noexcept {
    return frame_between(kind, id_, rank_, receiver);
  }
  [[nodiscard]] LaneSegment& lanes(LaneSet set) noexcept {
    return set == LaneSet::kMessages ? lanes_.messages : lanes_.collectives;
  }
  [[nodiscard]] Arrivals& arrivals(int sender, LaneSet set) noexcept {
    return arrivals_[static_cast<std::size_t>(set)][static_cast<std::size_t>(sender)];
  }
  void reserve_lane_from(int sender, LaneSet set);
  // Throws BadFrame unless `rank` is of the process that the frame has come from.
  void require_sender(const FrameHeader& header, std::uint64_t sender) const;
  // Whether the process is one of the ranks on that rank's host, which is another one than this.
  [[nodiscard]] bool is_of_host_of(int rank, std::uint64_t process) const;
  void require(bool makes_sense, const FrameHeader& header) const;
  // To a rank of the host that can be reached.
  void send_to_any_on(int host, FrameHeader header, std::span<const std::byte> payload = {});
  // An error, which must not be held up by one rank that is stopped or gone: to every rank of other
  // hosts that this one is connected to, and to one of each host.
  void spread(FrameHeader header, std::span<const std::byte> payload);
  void await_dialled() const;
  void tell_departure();
  // Whether something may still come, to this rank, from one that has told this host that it
  // leaves.
  [[nodiscard]] bool may_send_more(int rank) const noexcept;
  // Whether this rank is the one who tells its host what `rank` does: its counterpart, or any where
  // that one has ended.
  [[nodiscard]] bool speaks_for(int rank) const noexcept;

  // What brings the posts of some ranks, and before them what goes ahead of them. It refers to
  // post_ and to transit memory.
  void gather_frames(std::span<const int> ranks, std::uint64_t sequence, std::uint64_t round);
  void send_frames_to(int receiver);
  // Where a rank of another host deposits.
  [[nodiscard]] std::byte* place_of_deposit(const FrameHeader& header, int rank);
  void note_arrival(const FrameHeader& header, int rank);
  void take_posts(const FrameHeader& header, const std::byte* payload);
  void take_segment(const FrameHeader& header);
  void take_message_news(const FrameHeader& header, const std::byte* payload);
  // Segments that have passed between two ranks, of which this is one.
  [[nodiscard]] std::uint64_t segments(int sender, int receiver) const noexcept;
  void take_page(const FrameHeader& header, const std::byte* payload);
  void send_page(const FrameHeader& request);
  void ring_host() const noexcept;

  const int rank_;
  const Placement placement_;
  const std::uint64_t id_;
  const std::string token_;
  const std::shared_ptr<ProgressThread> progress_;  // has this process's doorbell
  const std::shared_ptr<TcpNode> node_;
  const GroupSegment segment_;
  Lanes lanes_;
  const std::vector<PeerPtr> peers_;  // by rank
  std::vector<int> other_hosts_;
  std::vector<std::byte> post_;                   // posts as they travel
  std::vector<Frame> frames_;                     // that bring them
  std::vector<std::unique_ptr<SendChannel>> to_;  // by rank
  std::vector<std::unique_ptr<ReceiveChannel>> from_;
  std::array<std::vector<Arrivals>, 2> arrivals_;          // by set of lanes, and rank
  std::vector<SegmentTargets> targets_;                    // of collectives; by rank
  std::vector<std::atomic<std::uint64_t>> last_segments_;  // by rank, plus one; 0: not told
  std::vector<bool> has_transit_;                          // of ranks on other hosts; the server's
  // By sender and rank: bytes that have come ahead of a post; the server's.
  std::map<std::pair<int, int>, std::uint64_t> eager_bytes_;
  std::atomic<std::int64_t> next_refresh_ns_{0};
  std::atomic<bool> has_passed_failure_on_{false};
  std::atomic<bool> has_departed_{false};
  std::atomic<bool> has_stopped_{false};
};

}  // namespace pydist
