// The sum of squares and the largest magnitude of many segments.
//
// Every block writes what it has into a slot of the workspace, and one more block adds the slots.
// There are as many blocks as tiles, up to a fixed number, whatever the device: so the order of
// additions depends on the segments alone.

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/arguments.h"
#include "kernels/cuda/module.h"
#include "kernels/cuda/tree.h"
#include "kernels/cuda/values.h"

namespace pydist::cuda {
namespace {

using Partial = PydistCudaNormResult;

constexpr std::uint64_t kSlots = kPydistCudaNormWorkspaceBytes / sizeof(Partial);

PYDIST_DEVICE Partial combined(Partial a, Partial b) {
  return {a.sum_of_squares + b.sum_of_squares, Maximum<double>::combine(a.largest, b.largest)};
}

PYDIST_DEVICE float magnitude(float value) {
  return bits_as<float>(bits_as<std::uint32_t>(value) & 0x7fffffffu);
}
PYDIST_DEVICE double magnitude(double value) {
  return bits_as<double>(bits_as<std::uint64_t>(value) & 0x7fffffffffffffffu);
}

// One rounding. The square of a float32 is exact in float64 anyway.
PYDIST_DEVICE double add_square(double sum, double value) {
#if defined(__CUDA_ARCH__)
  return __fma_rn(value, value, sum);
#else
  return __builtin_fma(value, value, sum);
#endif
}

struct NormShared {
  Partial* slots;
  std::uint64_t written;  // slots with something in them
};

// A thread's values of a tile, 16 at most, are added in `Accumulator` where they are float32 or
// less; tiles and threads in float64.
template <typename Accumulator>
struct GatherNorm {
  using Params = SegmentTable<ValueSegment, NormShared>;
  using Partial = PydistCudaNormResult;

  static PYDIST_DEVICE Partial gather(const Params& params, Place place) {
    Partial all = {0.0, 0.0};
    PYDIST_NO_UNROLL
    for (auto tile = static_cast<std::uint32_t>(place.block); tile < params.tiles;
         tile += static_cast<std::uint32_t>(place.blocks)) {
      Accumulator sum = 0;
      for_each_group(params.segments[params.segment_of(tile)], tile, place.thread,
                     [&](const auto& values, unsigned) { add(all, sum, values); });
      all.sum_of_squares += static_cast<double>(sum);
    }
    return all;
  }

  static PYDIST_DEVICE Partial combine(Partial a, Partial b) { return combined(a, b); }

  static PYDIST_DEVICE void finish(const Params& params, Place place, Partial partial) {
    Partial& slot = params.shared.slots[place.block];
    slot = place.block < params.shared.written ? combined(slot, partial) : partial;
  }

 private:
  // Values beyond the end are zero.
  template <typename Value>
  static PYDIST_DEVICE void add(Partial& all, Accumulator& sum, const Value (&values)[kGroup]) {
    Value largest = magnitude(values[0]);
    PYDIST_UNROLL
    for (unsigned v = 0; v < kGroup; ++v) {
      largest = Maximum<Value>::combine(largest, magnitude(values[v]));
      if constexpr (std::is_same_v<Value, double>) {
        all.sum_of_squares = add_square(all.sum_of_squares, values[v]);
      } else if constexpr (std::is_same_v<Accumulator, double>) {
        sum = add_square(sum, static_cast<double>(values[v]));
      } else {
        sum = sum + values[v] * values[v];
      }
    }
    all.largest = Maximum<double>::combine(all.largest, static_cast<double>(largest));
  }
};

struct FinishNorm {
  struct Params {
    const Partial* slots;
    std::uint64_t written;
    Partial* result;
  };
  using Partial = PydistCudaNormResult;

  static PYDIST_DEVICE Partial gather(const Params& params, Place place) {
    Partial all = {0.0, 0.0};
    for (std::uint64_t slot = place.thread; slot < params.written; slot += kBlockThreads) {
      all = combined(all, params.slots[slot]);
    }
    return all;
  }

  static PYDIST_DEVICE Partial combine(Partial a, Partial b) { return combined(a, b); }

  static PYDIST_DEVICE void finish(const Params& params, Place, Partial partial) {
    *params.result = {canonical(partial.sum_of_squares), canonical(partial.largest)};
  }
};

template <typename Accumulator>
int norm(const PydistCudaNorm& norm, void* stream) {
  using Gather = GatherNorm<Accumulator>;
  typename Gather::Params table = {};
  table.shared.slots = static_cast<Partial*>(norm.workspace);
  const int error =
      for_each_table(norm.segments, norm.segment_count, table, enter_values,
                     [&](typename Gather::Params& params, std::uint64_t) {
                       const std::uint64_t blocks = params.tiles < kSlots ? params.tiles : kSlots;
                       const int failure = launch_tree<Gather>(params, blocks, stream);
                       if (blocks > params.shared.written) {
                         params.shared.written = blocks;
                       }
                       return failure;
                     });
  if (error != 0) {
    return error;
  }
  const FinishNorm::Params last = {table.shared.slots, table.shared.written, norm.result};
  return launch_tree<FinishNorm>(last, /*blocks=*/1, stream);
}

}  // namespace

int load_norm_kernels() {
  for (const int error : {load_tree_kernel<GatherNorm<double>>(),
                          load_tree_kernel<GatherNorm<float>>(), load_tree_kernel<FinishNorm>()}) {
    if (error != 0) {
      return error;
    }
  }
  return 0;
}

}  // namespace pydist::cuda

int pydist_cuda_norm(const PydistCudaNorm* norm, void* stream) {
  using namespace pydist;
  if (norm == nullptr || !fault_in(*norm).empty()) {
    return cuda::kInvalidValue;
  }
  return norm->accumulate_dtype == DType::kFloat64 ? cuda::norm<double>(*norm, stream)
                                                   : cuda::norm<float>(*norm, stream);
}
