// News of the ranks of a group, for whoever moves their data by other means: NCCL, which cannot
// tell itself which rank has gone, and has a group of the same ranks on a host backend for the news
// alone.
//
// Thread safe.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"

namespace pydist {

// A rank of a group that is gone, and how far it took part before.
struct Absence {
  std::string what;  // for people: "rank 3 (pid 71 on host b) has died"
  ErrorKind kind = ErrorKind::kPeerLost;
  bool is_orderly = false;  // it has left by shutdown(); otherwise it has died or failed
  std::uint64_t done = 0;   // what it gave set_farewell()
  Blame blame{};            // without an operation

  // Whether the operation with this number, from 1, still needed the part of the rank that is gone.
  [[nodiscard]] bool lacks(std::uint64_t operation) const noexcept {
    return !is_orderly || done < operation;
  }
  // Whether this rank leaves more undone than the other.
  [[nodiscard]] bool is_worse_than(const Absence& other) const noexcept {
    return is_orderly == other.is_orderly ? done < other.done : !is_orderly;
  }
};

class PeerNews {
 public:
  virtual ~PeerNews() = default;

  // The rank that is gone; of several the one that leaves most undone. Nothing while all are there.
  [[nodiscard]] virtual std::optional<Absence> absence() const = 0;

  // From now on absence() tells of every rank that dies or leaves, whether anything is under way
  // or not. For backends that do not see it anyway; all ranks of the group call.
  virtual void watch_peers() {}

  // The ranks of which is known that they have not begun the operation with this number, from 1, of
  // those that all ranks alike note in their journals as of `fingerprint`.
  [[nodiscard]] virtual std::vector<int> not_begun(std::uint64_t /*fingerprint*/,
                                                   std::uint64_t /*number*/) const {
    return {};
  }

  // Of how many operations, all ranks counting alike, this rank has done its whole part.
  // Communicator::shutdown() tells the peers, see Absence.
  virtual void set_farewell(std::uint64_t done) noexcept = 0;
};

}  // namespace pydist
