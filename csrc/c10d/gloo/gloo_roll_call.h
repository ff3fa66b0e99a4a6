// Who is missing when a collective on gloo has failed; gloo itself does not say.
//
// A rank on which a collective fails says so in the group's store, and cuts its connections, so
// that the ranks that wait for its data fail too. A rank that leaves the group says so there, too,
// and of one that has died those say so that can see it, see Note [Deaths on gloo]. One that has
// not been heard of soon afterwards is late, stopped or dead, or waits only for ranks that are. So
// the last ranks to give up name exactly the culprits. Of those on its own host a rank also sees
// which are stopped, and does not wait for their answer.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "topology/key_value_store.h"

namespace pydist {

inline constexpr std::chrono::seconds kRollCallPatience{1};

inline constexpr const char* kHasDied = "has died";

struct RollCall {
  std::string sentence;      // how one is gone, or why nobody can tell; otherwise empty
  std::vector<int> missing;  // ascending
  std::string_view lost;     // how the one that is missing has gone, if that is known: a literal
};

// What the caller of a roll learns elsewhere meanwhile; asked now and then.
struct Lookout {
  std::function<bool()> has_news;        // that it does not matter any more who is missing
  std::function<bool(int)> is_disabled;  // that a rank cannot answer, as it is stopped
};

// For a rank on which collective number `sequence` of the group has failed; call after its
// connections have been cut. Takes up to kRollCallPatience while ranks are missing of which nobody
// knows why. `counts_leavers`: whether a rank that has left may be the reason. Not where the time
// was up: others then leave because this rank has cut its connections.
[[nodiscard]] RollCall call_roll(KeyValueStore& store, std::uint64_t sequence, int rank, int size,
                                 bool counts_leavers, const Lookout& lookout) noexcept;

// Tells all that a rank is gone, and how: a text that ends with kHasDied or the words of a
// Departure. Throws where the store does not answer.
void tell_gone(KeyValueStore& store, int rank, const std::string& how);
// What has been told; nothing while it has not. Throws where the store does not answer.
[[nodiscard]] std::optional<std::string> how_gone(KeyValueStore& store, int rank);
// The first of these ranks of which that has been told; nothing where the store does not answer.
// One question while all are there.
struct Gone {
  int rank;
  std::string how;
};
[[nodiscard]] std::optional<Gone> first_gone(KeyValueStore& store,
                                             const std::vector<int>& ranks) noexcept;
// Those words at the end of what has been told. A literal.
[[nodiscard]] std::string_view cause_in(std::string_view how) noexcept;

}  // namespace pydist
