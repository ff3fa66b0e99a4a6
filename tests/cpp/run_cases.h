// Runs cases on ranks that are threads, and checks every rank's memory after each.

#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/env.h"
#include "collective_case.h"
#include "ranks.h"

namespace pydist::testing {

// The order of summation that an algorithm promises.
[[nodiscard]] constexpr SummationOrder order_of(AlgorithmChoice algorithm) {
  return algorithm == AlgorithmChoice::kRing ? SummationOrder::kRing : SummationOrder::kRanks;
}

// Of so small chunks that small buffers have several.
inline constexpr std::size_t kSmallChunkBytes = 4096;

// The number of ranks, the algorithm, and where the buffers are.
using RanksAndRoad = std::tuple<int, AlgorithmChoice, Placement>;
[[nodiscard]] std::string name_of_ranks_and_road(
    const ::testing::TestParamInfo<RanksAndRoad>& info);

// One after the other, in one group; some asynchronously.
void run_cases(const std::vector<Case>& cases, int size, AlgorithmChoice algorithm,
               Placement placement, std::size_t chunk_bytes, const HostsOfRanks& hosts = {},
               std::optional<std::size_t> one_shot_bytes = std::nullopt,
               std::optional<std::size_t> rounds_from = std::nullopt);

}  // namespace pydist::testing
