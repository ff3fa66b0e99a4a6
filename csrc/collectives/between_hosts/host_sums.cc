#include "collectives/between_hosts/host_sums.h"

#include "collectives/float16_overflow.h"
#include "kernels/cpu/reduce.h"

namespace pydist {

HostSums::HostSums(const Collective& run, const Placement& placement)
    : wire_(run.wire()),
      unconverted_(run.call().dtype, run.call().dtype),
      travelling_(wire_.dtype(), wire_.dtype()),
      element_bytes_(run.element_bytes()),
      of_ranks_(run.call().op),
      of_hosts_(run.call().op) {
  const std::span<const int> ranks = placement.ranks_on(placement.host_of(run.me()));
  if (is_scaled_mean(of_hosts_, wire_.dtype())) {
    const ScaledMean mean = scaled_mean(run.size());
    of_ranks_ = ReduceOp::kPremulSum;
    factors_.assign(ranks.size(), mean.factor);
    divisor_ = mean.divisor;
  } else if (of_hosts_ == ReduceOp::kMean) {
    of_ranks_ = ReduceOp::kSum;
    divisor_ = run.size();
  } else if (of_hosts_ == ReduceOp::kPremulSum) {
    of_hosts_ = ReduceOp::kSum;
    for (const int rank : ranks) {
      factors_.push_back(run.group().detail(rank).factor);
    }
  }
}

void HostSums::combine_ranks(std::span<const void*> pieces, std::byte* sum, std::size_t count) {
  const Reduction reduction{unconverted_.dtype(), of_ranks_, 1.0, factors_};
  if (!wire_.converts()) {
    unconverted_.combine(reduction, pieces, 0, sum, nullptr, count);
    return;
  }
  unrounded_.resize(count * element_bytes_);
  void* const target = unrounded_.data();
  reduce(reduction, pieces, {&target, 1}, count);
  wire_.put(sum, unrounded_.data(), count);
}

void HostSums::combine_hosts(std::span<const void*> sums, std::byte* narrow, std::byte* output,
                             std::size_t count) const {
  const Reduction reduction{travelling_.dtype(), of_hosts_, divisor_, {}};
  if (!wire_.converts()) {
    travelling_.combine(reduction, sums, 0, nullptr, output, count);
    return;
  }
  travelling_.combine(reduction, sums, 0, narrow, nullptr, count);
  wire_.take(output, narrow, count);
}

}  // namespace pydist
