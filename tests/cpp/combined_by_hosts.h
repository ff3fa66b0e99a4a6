// What a reduction must give where each host reduces first, and then the hosts.

#pragma once

#include <span>
#include <vector>

#include "collective_case.h"

namespace pydist::testing {

// As collectives/between_hosts/by_hosts.h says: every host's sum is rounded to what travels.
// `hosts`: of each rank.
[[nodiscard]] Bytes combined_by_hosts(const Case& what, std::span<const Bytes> inputs,
                                      const std::vector<int>& hosts);

}  // namespace pydist::testing
