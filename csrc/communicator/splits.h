// The groups that are split off one group: who is in them, and under which names they meet.
//
// Note [Numbers of meetings]
// Groups with the same members are told apart by a number: each member's n-th call is for the n-th
// of them. So none of them is ever made of one member's first call and another's second. Where a
// call fails on one member, with no memory, say, or since the user interrupts it, it fails on all
// of them: whoever has come reads the reason, and whoever comes later finds it. All may then try
// again, and meet at the next number. The lowest member opens each meeting in the store, so that
// the others know whom they wait for until then.
//
// Thread safe.

#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "communicator/communicator.h"
#include "health/known_processes.h"
#include "topology/key_value_store.h"
#include "topology/rendezvous.h"

namespace pydist {

class Splits {
 public:
  // A member, by its rank in the group that is split.
  using KnownOf = std::function<KnownProcess(int rank)>;
  // Makes a group, under a name that is unique among the splits and the same on all its members.
  using Make = std::function<CommunicatorPtr(int rank, const std::string& name,
                                             const KnownProcesses& members)>;
  // Why a group will not stand, as a member has told; nothing while none has.
  using ToldOf = std::function<std::optional<ErrorDescription>(const std::string& name)>;
  // Tells the other members why this one will not be there. Returns what they throw: this, or what
  // another one has told before.
  using Decline =
      std::function<ErrorDescription(const std::string& name, const ErrorDescription& why)>;

  // The next split of a group of `size` into `ranks`, for its rank `rank`. `topic`: what names in
  // `store` begin with.
  //
  // Throws InvalidUsage, on this rank alone, for ranks that do not exist or stand twice, and for a
  // caller that is not among them. All else that it throws, all members throw: what `make` does,
  // and what ends the wait for the lowest member, which lasts until `deadline` at most.
  [[nodiscard]] CommunicatorPtr next(const std::vector<int>& ranks, int rank, int size,
                                     KeyValueStore& store, const std::string& topic,
                                     Deadline deadline, const CheckHope& check_hope,
                                     const KnownOf& known_of, const Make& make,
                                     const ToldOf& told_of, const Decline& decline);

 private:
  [[nodiscard]] int take(const std::string& members);

  std::mutex mutex_;
  std::map<std::string, int> numbers_;  // guarded by mutex_; the next one, by members
};

}  // namespace pydist
