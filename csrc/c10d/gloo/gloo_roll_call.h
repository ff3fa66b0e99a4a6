// Who is missing when a collective on gloo has failed; gloo itself does not say.
//
// A rank on which a collective fails says so in the group's store, and cuts its connections, so
// that the ranks that wait for its data fail too. A rank that has not said so soon afterwards is
// late, stopped or dead, or waits only for ranks that are. So the last ranks to give up name
// exactly the culprits.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "topology/key_value_store.h"

namespace pydist {

inline constexpr std::chrono::seconds kRollCallPatience{1};

struct RollCall {
  std::string sentence;      // empty where all have answered
  std::vector<int> missing;  // ascending
};

// For a rank on which collective number `sequence` of the group has failed; call after its
// connections have been cut. Takes up to kRollCallPatience while ranks are missing, unless
// `has_news`, which is asked now and then, says that it does not matter any more.
[[nodiscard]] RollCall call_roll(KeyValueStore& store, std::uint64_t sequence, int rank, int size,
                                 const std::function<bool()>& has_news) noexcept;

}  // namespace pydist
