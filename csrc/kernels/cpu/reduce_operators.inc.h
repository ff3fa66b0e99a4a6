// What reductions compute: sum, mean (here it divides), product, minimum, maximum and so on, for
// the vectors of one instruction set, in terms of simd.inc.h.
//
// first(x, 0) begins an accumulator, next(a, x, i) adds input i, finish(a) makes the result.
//
// Included by reduce_kernels.inc.h alone. Internal linkage throughout: see Note [One definition
// rule and instruction sets].

#pragma once

#include <utility>  // index_sequence, a type alone

#include "kernels/cpu/reduce_job.h"
#include "kernels/cpu/simd.inc.h"

namespace pydist::kernels {
namespace {

template <typename Vector>
constexpr bool kIsFloat = false;
template <>
constexpr bool kIsFloat<F32> = true;
template <>
constexpr bool kIsFloat<F64> = true;
template <>
constexpr bool kIsFloat<Pair> = true;

// What all operations but the weighted ones share; `Derived::combine` does the work.
template <typename Derived>
struct Simple {
  explicit Simple(const ReduceJob&) {}

  template <typename Accumulator>
  PYDIST_INLINE Accumulator first(Accumulator value, std::size_t) const {
    return value;
  }
  template <typename Accumulator>
  PYDIST_INLINE Accumulator next(Accumulator sum, Accumulator value, std::size_t) const {
    return Derived::combine(sum, value);
  }
  PYDIST_INLINE Pair next(Pair sum, Pair value, std::size_t) const {
    return {Derived::combine(sum.low, value.low), Derived::combine(sum.high, value.high)};
  }
  template <typename Accumulator>
  PYDIST_INLINE Accumulator finish(Accumulator value) const {
    if constexpr (kIsFloat<Accumulator>) {
      return canonical(value);
    } else {
      return value;
    }
  }
};

struct Sum : Simple<Sum> {
  using Simple::Simple;
  template <typename V>
  static PYDIST_INLINE V combine(V a, V b) {
    return a + b;
  }
};

struct Product : Simple<Product> {
  using Simple::Simple;
  template <typename V>
  static PYDIST_INLINE V combine(V a, V b) {
    return a * b;
  }
};

// The first of equal values stays, which matters for zeros of different sign.
struct Minimum : Simple<Minimum> {
  using Simple::Simple;
  template <typename V>
  static PYDIST_INLINE V combine(V a, V b) {
    if constexpr (kIsFloat<V>) {
      return ((b < a) | (b != b)) ? b : a;
    } else {
      return b < a ? b : a;
    }
  }
};

struct Maximum : Simple<Maximum> {
  using Simple::Simple;
  template <typename V>
  static PYDIST_INLINE V combine(V a, V b) {
    if constexpr (kIsFloat<V>) {
      return ((b > a) | (b != b)) ? b : a;
    } else {
      return b > a ? b : a;
    }
  }
};

struct And : Simple<And> {
  using Simple::Simple;
  template <typename V>
  static PYDIST_INLINE V combine(V a, V b) {
    return a & b;
  }
};

struct Or : Simple<Or> {
  using Simple::Simple;
  template <typename V>
  static PYDIST_INLINE V combine(V a, V b) {
    return a | b;
  }
};

struct Xor : Simple<Xor> {
  using Simple::Simple;
  template <typename V>
  static PYDIST_INLINE V combine(V a, V b) {
    return a ^ b;
  }
};

// The plain formula, without the recovery of infinities that the C standard suggests. Written with
// shuffles and a change of sign, not lane by lane: of the latter GCC 12 makes vfmaddsub, which
// rounds once where two roundings are asked for, even under -ffp-contract=off.
struct ComplexProduct : Simple<ComplexProduct> {
  using Simple::Simple;

  template <typename V>
  static PYDIST_INLINE V combine(V a, V b) {
    return combine(a, b, std::make_index_sequence<sizeof(V) / sizeof(a[0])>());
  }

  template <typename V, std::size_t... kLane>
  static PYDIST_INLINE V combine(V a, V b, std::index_sequence<kLane...>) {
    const V real = __builtin_shufflevector(b, b, (kLane & ~std::size_t{1})...);
    const V imaginary = __builtin_shufflevector(b, b, (kLane | 1)...);
    const V swapped = __builtin_shufflevector(a, a, (kLane ^ 1)...);
    const V minus_even = {(kLane % 2 == 0 ? -0.0f : 0.0f)...};
    return a * real + swapped * (V)((Raw)imaginary ^ (Raw)minus_even);
  }
};

struct Mean : Sum {
  double divisor;

  explicit Mean(const ReduceJob& job) : Sum(job), divisor(job.divisor) {}

  // A true division: a multiplication by the reciprocal would round twice.
  PYDIST_INLINE F32 finish(F32 sum) const { return canonical(sum / static_cast<float>(divisor)); }
  PYDIST_INLINE F64 finish(F64 sum) const { return canonical(sum / divisor); }
  PYDIST_INLINE Pair finish(Pair sum) const { return {finish(sum.low), finish(sum.high)}; }
};

struct PremultipliedSum {
  const double* factors;

  explicit PremultipliedSum(const ReduceJob& job) : factors(job.factors) {}

  PYDIST_INLINE F32 first(F32 value, std::size_t i) const {
    return value * static_cast<float>(factors[i]);
  }
  PYDIST_INLINE F64 first(F64 value, std::size_t i) const { return value * factors[i]; }
  PYDIST_INLINE Pair first(Pair value, std::size_t i) const {
    return {first(value.low, i), first(value.high, i)};
  }
  template <typename V>
  PYDIST_INLINE V next(V sum, V value, std::size_t i) const {
    return sum + first(value, i);
  }
  PYDIST_INLINE Pair next(Pair sum, Pair value, std::size_t i) const {
    return {next(sum.low, value.low, i), next(sum.high, value.high, i)};
  }
  template <typename V>
  PYDIST_INLINE V finish(V sum) const {
    return canonical(sum);
  }
};

}  // namespace
}  // namespace pydist::kernels
