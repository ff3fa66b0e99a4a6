// Runs cases on ranks that are threads, and checks every rank's memory after each.

#pragma once

#include <cstddef>
#include <vector>

#include "base/env.h"
#include "collective_case.h"

namespace pydist::testing {

// The order of summation that an algorithm promises.
[[nodiscard]] constexpr SummationOrder order_of(AlgorithmChoice algorithm) {
  return algorithm == AlgorithmChoice::kRing ? SummationOrder::kRing : SummationOrder::kRanks;
}

// One after the other, in one group; some asynchronously.
void run_cases(const std::vector<Case>& cases, int size, AlgorithmChoice algorithm,
               Placement placement, std::size_t chunk_bytes);

}  // namespace pydist::testing
