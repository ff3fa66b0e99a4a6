#include "run_cases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "collectives/ring.h"
#include "collectives/shared_memory/route.h"
#include "heap_of_cases.h"
#include "memory/shared_segment.h"
#include "ranks.h"

namespace pydist::testing {
namespace {

constexpr std::size_t kHeapBytes = std::size_t{12} << 20;

}  // namespace

std::string name_of_ranks_and_road(const ::testing::TestParamInfo<RanksAndRoad>& info) {
  const auto& [size, algorithm, placement] = info.param;
  return join(size, "Ranks", algorithm == AlgorithmChoice::kRing ? "Ring" : "Auto",
              to_string(placement));
}

void run_cases(const std::vector<Case>& cases, int size, AlgorithmChoice algorithm,
               Placement placement, std::size_t chunk_bytes, const HostsOfRanks& hosts,
               std::optional<std::size_t> one_shot_bytes, std::optional<std::size_t> rounds_from) {
  const bool has_hosts_of_several = std::set<int>(hosts.begin(), hosts.end()).size() < hosts.size();
  std::vector<PreparedCase> prepared;
  for (const Case& what : cases) {
    // Small ones are sent to all ranks, each of which combines them.
    const std::size_t elements =
        what.kind == OpKind::kReduceScatter
            ? std::accumulate(what.counts.begin(), what.counts.end(), std::size_t{0})
            : what.counts.at(0);
    const std::size_t bytes = elements * element_size(what.wire_dtype.value_or(what.dtype));
    const bool is_small =
        size == 1 ||
        bytes <= std::max(kInlineBytes,
                          one_shot_limit(what.kind, size, round_up(chunk_bytes, page_bytes()),
                                         one_shot_bytes));
    const bool goes_by_ring = algorithm == AlgorithmChoice::kRing && ring_supports(what.kind);
    const bool goes_by_hosts = has_hosts_of_several && !goes_by_ring && !is_small;
    prepared.push_back(
        prepare(what, size, order_of(algorithm), goes_by_hosts ? hosts : HostsOfRanks()));
  }
  Environment environment = test_environment();
  environment.algorithm = algorithm;
  environment.chunk_bytes = chunk_bytes;
  environment.one_shot_bytes = one_shot_bytes;
  environment.rounds_from = rounds_from;
  run_ranks(
      size,
      [&](RankOfTest& self) {
        const HeapOfCases heap(*self.communicator, self.rank, placement, kHeapBytes);
        CaseBuffers buffers(heap.bytes());
        for (const PreparedCase& each : prepared) {
          Operation operation = buffers.lay_out(each, self.rank, placement);
          if (mix(each.what.seed + static_cast<std::uint64_t>(self.rank)) % 4 == 0) {
            self.communicator->submit(std::move(operation))->wait();
          } else {
            self.communicator->run(std::move(operation));
          }
          const std::string wrong = buffers.check();
          ASSERT_TRUE(wrong.empty()) << "rank " << self.rank << ", " << each.what.to_string()
                                     << ", chunks of " << chunk_bytes << " bytes: " << wrong;
        }
      },
      environment, hosts);
}

}  // namespace pydist::testing
