// The connections that a group needs first between hosts, made when its ranks meet: that they can
// be is the proof that the hosts reach each other.

#pragma once

#include <vector>

#include "base/deadline.h"
#include "communicator/peers/endpoint.h"
#include "health/known_processes.h"
#include "topology/placement.h"
#include "transport/tcp/tcp_node.h"

namespace pydist {

class FirstConnections {
 public:
  // Begins to connect `rank` with its counterpart on each other host, and with those whose
  // counterpart it is. `peers` by rank.
  FirstConnections(TcpNode& node, int rank, const Placement& placement,
                   const std::vector<PeerPtr>& peers, Deadline deadline);

  // Waits until they are there. `check_hope` is called now and then for the rank that is waited
  // for, and throws to end the wait. Throws TransportError that names both ends where one cannot be
  // made in time. `processes` are those of all ranks, `cards` say where they listen.
  void wait(const CheckHopeOf& check_hope, const KnownProcesses& processes,
            const std::vector<NodeCard>& cards);

 private:
  [[noreturn]] void throw_unreachable(int peer, const KnownProcesses& processes,
                                      const std::vector<NodeCard>& cards) const;

  TcpNode& node_;
  const int rank_;
  const std::vector<PeerPtr>& peers_;
  const Deadline patience_;
  const Deadline both_dial_;
  std::vector<int> needed_;
};

}  // namespace pydist
