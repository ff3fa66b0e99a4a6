// Segments that are only read: what norm and non-finite check have in common.

#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/segments.h"

namespace pydist::cuda {

struct ValueSegment {
  const void* values;
  std::uint64_t count;
  std::uint32_t first_tile;
  DType dtype;  // floating point
};

// Complex numbers are twice as many parts.
inline ValueSegment enter_values(const PydistCudaValues& given) {
  ValueSegment entry = {};
  entry.values = given.values;
  entry.count = is_complex(given.dtype) ? 2 * given.count : given.count;
  entry.dtype = given.dtype == DType::kComplex64    ? DType::kFloat32
                : given.dtype == DType::kComplex128 ? DType::kFloat64
                                                    : given.dtype;
  return entry;
}

// Calls use(values, kGroup or fewer) for every group of a tile that is this thread's. Which element
// is whose depends on the count alone, never on the alignment. `Value` is float, or double for
// float64 segments.
template <typename Value, typename Use>
PYDIST_DEVICE void for_each_group(const ValueSegment& segment, DType dtype, std::uint64_t first,
                                  unsigned count, unsigned thread, Use use) {
  const unsigned bytes = float_bytes(dtype);
  if (count == kTileElements && is_group_aligned(segment.values, bytes)) {
    RawGroup raw[kTileGroups];
    PYDIST_UNROLL
    for (unsigned k = 0; k < kTileGroups; ++k) {
      raw[k] =
          load_group<kGroup>(segment.values, first + (k * kBlockThreads + thread) * kGroup, bytes);
    }
    PYDIST_UNROLL
    for (unsigned k = 0; k < kTileGroups; ++k) {
      Value values[kGroup];
      widen_group<kGroup>(dtype, raw[k], values);
      use(values, kGroup);
    }
    return;
  }
  PYDIST_NO_UNROLL
  for (unsigned k = 0; k < kTileGroups; ++k) {
    const unsigned begin = (k * kBlockThreads + thread) * kGroup;
    const unsigned here = begin >= count ? 0 : count - begin < kGroup ? count - begin : kGroup;
    Value values[kGroup] = {};
    PYDIST_UNROLL
    for (unsigned v = 0; v < kGroup; ++v) {
      if (v < here) {
        Value value[1];
        widen_group<1>(dtype, load_group<1>(segment.values, first + begin + v, bytes), value);
        values[v] = value[0];
      }
    }
    if (here > 0) {
      use(values, here);
    }
  }
}

// The same with the dtype known when compiling; use() takes groups of float and of double.
template <typename Use>
PYDIST_DEVICE void for_each_group(const ValueSegment& segment, std::uint32_t tile, unsigned thread,
                                  Use use) {
  const std::uint64_t first = std::uint64_t{tile - segment.first_tile} * kTileElements;
  const std::uint64_t left = segment.count - first;
  const unsigned count = left < kTileElements ? static_cast<unsigned>(left) : kTileElements;
  switch (segment.dtype) {
    case DType::kFloat64:
      return for_each_group<double>(segment, DType::kFloat64, first, count, thread, use);
    case DType::kFloat32:
      return for_each_group<float>(segment, DType::kFloat32, first, count, thread, use);
    case DType::kFloat16:
      return for_each_group<float>(segment, DType::kFloat16, first, count, thread, use);
    default:
      return for_each_group<float>(segment, DType::kBFloat16, first, count, thread, use);
  }
}

}  // namespace pydist::cuda
