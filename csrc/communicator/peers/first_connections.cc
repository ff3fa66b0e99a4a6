#include "communicator/peers/first_connections.h"

#include <chrono>
#include <string>
#include <thread>

#include "base/error.h"
#include "health/journal.h"

namespace pydist {
namespace {

// How long they may take, once all ranks are there, and how often it is looked whether they are.
constexpr std::chrono::seconds kConnectPatience{20};
constexpr std::chrono::milliseconds kConnectLook{1};
// How long one end alone dials.
constexpr std::chrono::seconds kOneDials{1};

}  // namespace

FirstConnections::FirstConnections(TcpNode& node, int rank, const Placement& placement,
                                   const std::vector<PeerPtr>& peers, Deadline deadline)
    : node_(node),
      rank_(rank),
      peers_(peers),
      patience_(deadline.earlier_of(Deadline::in(kConnectPatience))),
      both_dial_(Deadline::in(kOneDials)) {
  for (int peer = 0; peer < placement.size(); ++peer) {
    if (!placement.share_host(peer, rank) &&
        (placement.counterpart(rank, placement.host_of(peer)) == peer ||
         placement.counterpart(peer, placement.host_of(rank)) == rank)) {
      needed_.push_back(peer);
      const Link& link = *peers[static_cast<std::size_t>(peer)]->link;
      // One end is enough.
      if (node.card().name < link.peer()) {
        node.connect(link, patience_);
      }
    }
  }
}

void FirstConnections::wait(const CheckHopeOf& check_hope, const KnownProcesses& processes,
                            const std::vector<NodeCard>& cards) {
  for (const int peer : needed_) {
    const Link& link = *peers_[static_cast<std::size_t>(peer)]->link;
    while (!link.is_up()) {
      check_hope(peer);
      if (both_dial_.has_passed()) {
        node_.connect(link, patience_);  // connections may be let through in one direction alone
      }
      if (patience_.has_passed()) {
        throw_unreachable(peer, processes, cards);
      }
      std::this_thread::sleep_for(kConnectLook);
    }
    // Its first sign of life.
    peers_[static_cast<std::size_t>(peer)]->mirror->heartbeat_ns.store(monotonic_ns(),
                                                                       std::memory_order_relaxed);
  }
}

void FirstConnections::throw_unreachable(int peer, const KnownProcesses& processes,
                                         const std::vector<NodeCard>& cards) const {
  const auto place = static_cast<std::size_t>(peer);
  std::string why = node_.hindrance(*peers_[place]->link);
  if (why.empty()) {
    why = join("no connection came from ", cards[place].addresses[0]);
  }
  const KnownProcess& its = processes[place];
  const std::string cause =
      join("can't be connected with ", processes[static_cast<std::size_t>(rank_)].who(), ": ", why);
  throw TransportError(join(its.who(), " ", cause,
                            ". Name the interface that hosts reach each other by "
                            "(PYDIST_INTERFACE), and open a range of ports between them "
                            "(PYDIST_PORTS); PYDIST_BACKEND=gloo does without."),
                       its.blame(cause));
}

}  // namespace pydist
