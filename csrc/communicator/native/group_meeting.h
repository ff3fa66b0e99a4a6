// How the ranks of a native group come together: they introduce themselves through the store, meet
// face to face over sockets, and share memory; or all of them learn why that cannot be.

#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/between_hosts/between_hosts.h"
#include "collectives/group_segment.h"
#include "communicator/native/native_communicator.h"
#include "communicator/peers/endpoint.h"
#include "communicator/peers/remote_ranks.h"
#include "memory/job_secret.h"
#include "memory/process_memory.h"
#include "memory/shared_segment.h"
#include "topology/key_value_store.h"
#include "transport/lane_segment.h"

namespace pydist {

// Everything that a group is made of, on one of its hosts.
struct NativeMembership {
  std::shared_ptr<Endpoint> endpoint;
  EndpointUse endpoint_use;
  std::vector<PeerPtr> peers;
  GroupSegment group_segment;
  LaneSegment message_segment;
  std::shared_ptr<RemoteRanks> remote;  // null where all ranks are on one host
  RoundsSettings rounds{};              // between hosts
  SharedFile heap_file;
  std::vector<std::string> memory_limits;   // of each rank of this host, as memory_limits()
  std::vector<ProcessMemory> processes;     // of all ranks, if all can read all; or none
  std::shared_ptr<const JobSecret> secret;  // for the groups that are split off
};

// For rank 0 of the group `name`, which has the introductions of all ranks, in rank order, and its
// `own`: the roster, which all of them need. `processes` are theirs, and are completed. Throws
// TransportError where they can't make up a group, Mismatch where they are not set alike.
[[nodiscard]] std::string make_native_roster(OwnIntroduction& own, KeyValueStore& store,
                                             const std::string& name,
                                             const std::vector<std::string>& introductions,
                                             KnownProcesses& processes);

// Collective over the group. Whatever fails on one rank, from here to the end of the meeting, is
// told to all, which throw the error of the first: TransportError (no descriptor, thread or memory
// is left, a peer cannot be reached), PeerLost where a rank has died, Aborted where one was
// interrupted, Timeout where one never comes.
[[nodiscard]] NativeMembership meet_group(KeyValueStore& store, int rank, int size,
                                          const NativeOptions& options, Introduced introduced);

// For a rank that will not come to a meeting of the group `name`, as decline() and declined().
ErrorDescription decline_native_group(KeyValueStore& store, const std::string& name,
                                      const ErrorDescription& why);
[[nodiscard]] std::optional<ErrorDescription> native_group_declined(KeyValueStore& store,
                                                                    const std::string& name);

}  // namespace pydist
