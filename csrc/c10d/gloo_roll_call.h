// Who is missing when a collective on gloo has failed; gloo itself does not say.
//
// A rank on which a collective fails says so in the group's store, and cuts its connections, so
// that those who wait for its data fail too. Who has not said so soon after is late, stopped or
// dead, or waits for such a rank alone; the last ranks to give up name just the culprits.

#pragma once

#include <cstdint>
#include <vector>

#include "topology/key_value_store.h"

namespace pydist {

// For a rank on which collective number `sequence` of the group has failed; call after its
// connections have been cut. Takes up to a second while ranks are missing. Empty where all answer,
// and where the store is gone.
[[nodiscard]] std::vector<int> find_missing(KeyValueStore& store, std::uint64_t sequence, int rank,
                                            int size) noexcept;

}  // namespace pydist
