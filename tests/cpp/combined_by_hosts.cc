#include "combined_by_hosts.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <memory>
#include <utility>

#include "kernels/cpu/convert.h"
#include "kernels/cpu/reduce.h"

namespace pydist::testing {

Bytes combined_by_hosts(const Case& what, std::span<const Bytes> inputs,
                        const std::vector<int>& hosts) {
  auto output = std::make_shared<std::vector<std::byte>>(inputs[0]->size());
  const std::size_t count = inputs[0]->size() / element_size(what.dtype);
  if (count == 0) {
    return output;
  }
  const DType type = what.wire_dtype.value_or(what.dtype);
  const double ranks = static_cast<double>(inputs.size());
  const bool is_mean = what.op == ReduceOp::kMean;
  const bool is_scaled = is_mean && type == DType::kFloat16;
  const double power = std::bit_ceil(inputs.size());
  std::vector<std::vector<std::byte>> sums;
  const int last = *std::max_element(hosts.begin(), hosts.end());
  std::vector<const void*> all_sums;
  for (int host = 0; host <= last; ++host) {
    std::vector<const void*> sources;
    std::vector<double> factors;
    for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
      if (hosts[rank] != host) {
        continue;
      }
      sources.push_back(inputs[rank]->data());
      factors.push_back(is_scaled ? 1.0 / power : premul_factor(static_cast<int>(rank)));
    }
    std::vector<std::byte> unrounded(count * element_size(what.dtype));
    void* const target = unrounded.data();
    const ReduceOp op = is_scaled ? ReduceOp::kPremulSum : is_mean ? ReduceOp::kSum : what.op;
    reduce({what.dtype, op, 1.0, factors}, sources, {&target, 1}, count);
    auto& sum = sums.emplace_back(count * element_size(type));
    if (what.wire_dtype) {
      narrow_from_float32(type, reinterpret_cast<const float*>(unrounded.data()), sum.data(),
                          count);
    } else {
      sum = std::move(unrounded);
    }
  }
  for (const auto& sum : sums) {
    all_sums.push_back(sum.data());
  }
  std::vector<std::byte> result(count * element_size(type));
  void* const target = result.data();
  const ReduceOp op = what.op == ReduceOp::kPremulSum ? ReduceOp::kSum : what.op;
  reduce({type, op, is_scaled ? ranks / power : ranks, {}}, all_sums, {&target, 1}, count);
  if (what.wire_dtype) {
    widen_to_float32(type, result.data(), reinterpret_cast<float*>(output->data()), count);
  } else {
    *output = std::move(result);
  }
  return output;
}

}  // namespace pydist::testing
