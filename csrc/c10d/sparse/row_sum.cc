#include "c10d/sparse/row_sum.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "c10d/tensors.h"
#include "kernels/cpu/reduce.h"

namespace pydist {
namespace {

// The rows of a summand that are still to be merged.
struct Rest {
  std::size_t summand;
  const std::int64_t* index;  // of the next row
  const std::byte* value;
  std::int64_t rows;
};

}  // namespace

SparseRows sum_of_rows(const std::vector<SparseRows>& summands) {
  const at::Tensor& like = summands[0].values;
  const std::int64_t dimensions = summands[0].indices.size(1);
  std::int64_t most = 0;
  for (const SparseRows& each : summands) {
    most += each.indices.size(0);
  }
  std::vector<std::int64_t> shape = like.sizes().vec();
  shape[0] = most;
  SparseRows sum{at::empty({most, dimensions}, summands[0].indices.options()),
                 at::empty(shape, like.options())};
  const std::size_t width =
      most == 0 ? 0 : static_cast<std::size_t>(sum.values.numel()) / static_cast<std::size_t>(most);
  const std::size_t row_bytes = width * like.itemsize();

  // Whether the next row of `one` comes behind that of `other`: a heap has the first on top.
  const auto is_behind = [dimensions](const Rest& one, const Rest& other) {
    for (std::int64_t dimension = 0; dimension < dimensions; ++dimension) {
      if (one.index[dimension] != other.index[dimension]) {
        return one.index[dimension] > other.index[dimension];
      }
    }
    return one.summand > other.summand;
  };
  std::vector<Rest> rests;
  for (std::size_t i = 0; i < summands.size(); ++i) {
    if (summands[i].indices.size(0) != 0) {
      rests.push_back({i, summands[i].indices.const_data_ptr<std::int64_t>(),
                       static_cast<const std::byte*>(summands[i].values.const_data_ptr()),
                       summands[i].indices.size(0)});
    }
  }
  std::make_heap(rests.begin(), rests.end(), is_behind);

  auto* const indices = sum.indices.mutable_data_ptr<std::int64_t>();
  auto* const values = static_cast<std::byte*>(sum.values.mutable_data_ptr());
  const Reduction addition{*dtype_of(like.scalar_type()), ReduceOp::kSum};
  const auto index_bytes = static_cast<std::size_t>(dimensions) * sizeof(std::int64_t);
  std::int64_t rows = 0;
  std::vector<const void*> alike;  // the values of the row that is being made
  while (!rests.empty()) {
    std::int64_t* const index = indices + rows * dimensions;
    std::memcpy(index, rests.front().index, index_bytes);
    alike.clear();
    while (!rests.empty() && std::memcmp(rests.front().index, index, index_bytes) == 0) {
      std::pop_heap(rests.begin(), rests.end(), is_behind);
      Rest& rest = rests.back();
      alike.push_back(rest.value);
      rest.index += dimensions;
      rest.value += row_bytes;
      if (--rest.rows == 0) {
        rests.pop_back();
      } else {
        std::push_heap(rests.begin(), rests.end(), is_behind);
      }
    }
    void* target = values + static_cast<std::size_t>(rows) * row_bytes;
    if (alike.size() == 1) {
      std::memcpy(target, alike[0], row_bytes);
    } else if (width != 0) {
      reduce(addition, alike, {&target, 1}, width);
    }
    ++rows;
  }
  return {sum.indices.narrow(0, 0, rows), sum.values.narrow(0, 0, rows)};
}

}  // namespace pydist
