// The processes that are to make up a group, as each of them knows the others before they meet:
// from the group that the new one is made of, or from the job.

#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "health/process_state.h"
#include "topology/rendezvous.h"

namespace pydist {

struct KnownProcess {
  int rank = 0;               // in the group that the new one is made of
  std::string host = {};      // empty where it is not known yet
  int pid = 0;                // as it knows itself; 0 where it is not known yet
  pid_t local_pid = 0;        // as this process knows it; 0 where it does not see it
  std::uint64_t started = 0;  // in ticks of the machine's clock; 0 where that is not known

  // "rank 2 (pid 71 on host b)".
  [[nodiscard]] std::string who() const;
  [[nodiscard]] ProcessState state() const noexcept;
  [[nodiscard]] Blame blame(std::string cause) const;
};

// By rank in the new group. All errors of its making number the ranks as these do.
using KnownProcesses = std::vector<KnownProcess>;

// Of a group that is made of no other one, whose processes nobody knows yet.
[[nodiscard]] KnownProcesses strangers(int size);

// Empty, or what an error is to say of the numbers of ranks.
[[nodiscard]] std::string on_numbers(const KnownProcesses& processes);

// For ranks that wait for others to make a group: throws PeerLost where one of them is found to
// have ended. They are looked at now and then. Null where none can be seen.
[[nodiscard]] CheckHope hope_that_live(KnownProcesses processes);

// The Timeout of those that wait for `missing`, numbered as in the new group `name`: what the
// system says of each. Blames those of them that are known not to run; if none is, all of them.
[[nodiscard]] ErrorDescription lateness(const KnownProcesses& processes, const std::string& name,
                                        const std::vector<int>& missing);

}  // namespace pydist
