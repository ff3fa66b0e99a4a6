// The check for infinities and NaN.

#include <cstdint>

#include "kernels/cuda/arguments.h"
#include "kernels/cuda/module.h"
#include "kernels/cuda/values.h"

namespace pydist::cuda {
namespace {

struct NonFiniteShared {
  std::uint32_t* flags;  // of the table's first segment
  std::uint32_t* count;
};

// Sets a flag, and counts it if it was not set.
PYDIST_DEVICE void raise(std::uint32_t* flag, std::uint32_t* count) {
#if defined(__CUDA_ARCH__)
  // Most find it set where there is much to be found, and need no atomic.
  if (*static_cast<volatile std::uint32_t*>(flag) == 0 && atomicExch(flag, 1u) == 0) {
    atomicAdd(count, 1u);
  }
#else
  *count += *flag == 0 ? 1 : 0;
  *flag = 1;
#endif
}

struct FindNonFinite {
  using Params = SegmentTable<ValueSegment, NonFiniteShared>;

  static PYDIST_DEVICE void run(const Params& params, Place place) {
    PYDIST_NO_UNROLL
    for (auto tile = static_cast<std::uint32_t>(place.block); tile < params.tiles;
         tile += static_cast<std::uint32_t>(place.blocks)) {
      const std::uint32_t index = params.segment_of(tile);
      bool found = false;
      for_each_group(params.segments[index], tile, place.thread,
                     [&found](const auto& values, unsigned) {
                       PYDIST_UNROLL
                       for (unsigned v = 0; v < kGroup; ++v) {
                         found = found || !is_finite(values[v]);
                       }
                     });
      if (found) {
        raise(params.shared.flags + index, params.shared.count);
      }
    }
  }
};

}  // namespace

int load_non_finite_kernels() { return load_kernel<FindNonFinite>(); }

}  // namespace pydist::cuda

int pydist_cuda_find_non_finite(const PydistCudaNonFinite* check, void* stream) {
  using namespace pydist;
  using namespace pydist::cuda;
  if (check == nullptr || !fault_in(*check).empty()) {
    return kInvalidValue;
  }
  if (const int error = set_to_zero(check->count, sizeof *check->count, stream); error != 0) {
    return error;
  }
  if (check->segment_count > 0) {
    const std::size_t bytes = check->segment_count * sizeof *check->flags;
    if (const int error = set_to_zero(check->flags, bytes, stream); error != 0) {
      return error;
    }
  }
  FindNonFinite::Params table = {};
  table.shared.count = check->count;
  return for_each_table(check->segments, check->segment_count, table, enter_values,
                        [&](FindNonFinite::Params& params, std::uint64_t first) {
                          params.shared.flags = check->flags + first;
                          return launch<FindNonFinite>(params, params.tiles, stream);
                        });
}
