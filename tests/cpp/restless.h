// Groups whose tuner tries something with every operation, and what it has timed.

#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "communicator/native/native_communicator.h"
#include "ranks.h"
#include "tuning/tuning_table.h"

namespace pydist::testing {

inline constexpr TuningRhythm kRestless{.uses_before_first = 0, .rounds = 3, .always_tries = true};
// Each candidate has one turn in a session.
inline constexpr TuningRhythm kShortSessions{
    .uses_before_first = 0, .rounds = 1, .always_tries = true};

inline CommunicatorPtr join_restless(const RankOfTest& self, const Environment& environment,
                                     const TuningRhythm& rhythm = kRestless) {
  NativeOptions options{"restless", environment};
  options.tuning = rhythm;
  return create_native_communicator(self.store, self.rank, self.size, options, {self.endpoint});
}

// Bytes of a piece (0: one shot), whether stores stream, and whether ranks read in place.
using Way = std::tuple<std::uint32_t, bool, bool>;

// What this process has timed, by kind and memory. A root is timed only where all others wait.
inline std::map<std::pair<OpKind, TunedMemory>, std::set<Way>> timed(int ranks) {
  std::map<std::pair<OpKind, TunedMemory>, std::set<Way>> found;
  for (const auto& [key, entry] : TuningTable::of_process().entries()) {
    for (const auto& [choice, time_us] : entry.times_us) {
      if (key.ranks == ranks && time_us > 0) {
        found[{key.kind, key.memory}].insert({choice.piece_bytes, choice.streams, choice.in_place});
      }
    }
  }
  return found;
}

}  // namespace pydist::testing
