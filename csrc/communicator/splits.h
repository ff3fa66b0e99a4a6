// The groups that are split off one group: who is in them, and under which names they meet.
//
// Note [Numbers of meetings]
// Groups with the same members are told apart by a number. If every rank counted by itself, a rank
// that fails alone (it has no memory, or was interrupted) and tries again would count on, and wait
// under a name that nobody else uses. So the lowest member counts, and opens each meeting in the
// store before it goes there. The others take part in the first one that has been opened, is not
// over, and to which they have not been. Where a meeting fails, the lowest member says that it is
// over.
//
// Thread safe.

#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <set>
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
  // Tells the other members why this one will not be there. Returns what they throw: this, or what
  // another one has told before.
  using Decline =
      std::function<ErrorDescription(const std::string& name, const ErrorDescription& why)>;

  // The next split of a group of `size` into `ranks`, for its rank `rank`. Throws InvalidUsage for
  // ranks that do not exist or stand twice, and for a caller that is not among them; what the other
  // members do not hear of. Otherwise as `make`; the others wait for the lowest member no longer
  // than `deadline`, and decline where the user ends that wait. `topic`: what names in `store`
  // begin with.
  [[nodiscard]] CommunicatorPtr next(const std::vector<int>& ranks, int rank, int size,
                                     KeyValueStore& store, const std::string& topic,
                                     Deadline deadline, const CheckHope& check_hope,
                                     const KnownOf& known_of, const Make& make,
                                     const Decline& decline);

 private:
  // The meetings of one set of members that this process has not been to: `skipped`, and all from
  // `next` on.
  struct Numbers {
    int next = 0;
    std::set<int> skipped;
  };

  [[nodiscard]] int take(const std::string& members);
  void put_back(const std::string& members, int number);

  std::mutex mutex_;
  std::map<std::string, Numbers> numbers_;  // guarded by mutex_
};

}  // namespace pydist
