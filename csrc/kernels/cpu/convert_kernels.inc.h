// The conversions of one instruction set between the 16-bit floating-point types and float32, in
// terms of simd.inc.h. They round and treat NaN as the reductions do; see reduce.h.
//
// Included once by each kernels_<set>.cc. Internal linkage throughout: see Note [One definition
// rule and instruction sets].

#pragma once

#include <utility>  // index_sequence, a type alone

#include "kernels/cpu/reduce_job.h"
#include "kernels/cpu/simd.inc.h"

namespace pydist::kernels {
namespace {

// ---- the order of elements ----------------------------------------------------------------
// Reductions don't care which elements are in which half of a Pair; conversions do.

constexpr std::size_t kFloats = kVectorBytes / sizeof(float);

// From (even elements, odd elements) to (first half, second half).
template <std::size_t... kLane>
PYDIST_INLINE Pair interleave(Pair pair, std::index_sequence<kLane...>) {
  return {__builtin_shufflevector(pair.low, pair.high, (kLane / 2 + (kLane % 2) * kFloats)...),
          __builtin_shufflevector(pair.low, pair.high,
                                  ((kFloats + kLane) / 2 + (kLane % 2) * kFloats)...)};
}

// The way back.
template <std::size_t... kLane>
PYDIST_INLINE Pair take_apart(Pair pair, std::index_sequence<kLane...>) {
  return {__builtin_shufflevector(pair.low, pair.high, (2 * kLane)...),
          __builtin_shufflevector(pair.low, pair.high, (2 * kLane + 1)...)};
}

using Lanes = std::make_index_sequence<kFloats>;

struct Float16InOrder {
  static PYDIST_INLINE Pair widen(Raw raw) {
    const Pair pair = widen_float16(raw);
    return kFloat16IsEvenOdd ? interleave(pair, Lanes()) : pair;
  }
  static PYDIST_INLINE Raw narrow(Pair pair) {
    return narrow_float16(kFloat16IsEvenOdd ? take_apart(pair, Lanes()) : pair);
  }
};

struct BFloat16InOrder {
  static PYDIST_INLINE Pair widen(Raw raw) {
    return interleave(widen_to_upper_halves(raw), Lanes());
  }
  static PYDIST_INLINE Raw narrow(Pair pair) {
    const Pair parts = take_apart(pair, Lanes());
    return narrow_upper_halves(round_to_upper_half(parts.low), round_to_upper_half(parts.high));
  }
};

// ---- walking ------------------------------------------------------------------------------
// A step takes one vector of 16-bit elements and two of float32.

template <typename Format>
void widen_all(const unsigned char* from, unsigned char* to, std::size_t count) {
  std::size_t left = count * 2;
  for (; left >= kVectorBytes; left -= kVectorBytes) {
    const Pair pair = canonical(Format::widen(load(from)));
    store(to, (Raw)pair.low);
    store(to + kVectorBytes, (Raw)pair.high);
    from += kVectorBytes;
    to += 2 * kVectorBytes;
  }
  if (left > 0) {
    const Pair pair = canonical(Format::widen(load_partial(from, left)));
    if (2 * left >= kVectorBytes) {
      store(to, (Raw)pair.low);
      store_partial(to + kVectorBytes, (Raw)pair.high, 2 * left - kVectorBytes);
    } else {
      store_partial(to, (Raw)pair.low, 2 * left);
    }
  }
}

template <typename Format>
void narrow_all(const unsigned char* from, unsigned char* to, std::size_t count) {
  std::size_t left = count * 2;
  for (; left >= kVectorBytes; left -= kVectorBytes) {
    const Pair pair = {(F32)load(from), (F32)load(from + kVectorBytes)};
    store(to, Format::narrow(canonical(pair)));
    from += 2 * kVectorBytes;
    to += kVectorBytes;
  }
  if (left > 0) {
    Pair pair = {};
    if (2 * left >= kVectorBytes) {
      pair.low = (F32)load(from);
      pair.high = (F32)load_partial(from + kVectorBytes, 2 * left - kVectorBytes);
    } else {
      pair.low = (F32)load_partial(from, 2 * left);
    }
    store_partial(to, Format::narrow(canonical(pair)), left);
  }
}

void widen_here(DType from, const void* input, float* output, std::size_t count) noexcept {
  const auto* bytes = static_cast<const unsigned char*>(input);
  auto* to = reinterpret_cast<unsigned char*>(output);
  if (from == DType::kFloat16) {
    widen_all<Float16InOrder>(bytes, to, count);
  } else {
    widen_all<BFloat16InOrder>(bytes, to, count);
  }
}

void narrow_here(DType to, const float* input, void* output, std::size_t count) noexcept {
  const auto* from = reinterpret_cast<const unsigned char*>(input);
  auto* bytes = static_cast<unsigned char*>(output);
  if (to == DType::kFloat16) {
    narrow_all<Float16InOrder>(from, bytes, count);
  } else {
    narrow_all<BFloat16InOrder>(from, bytes, count);
  }
}

}  // namespace
}  // namespace pydist::kernels
