// The fused optimizer step of one instruction set, in terms of simd.inc.h.
//
// A kernel is a rule (Adam, SGD) times the formats of gradient and parameter. It walks all arrays
// of a segment at once, two vectors of values at a time: reads each array once, computes in
// registers, writes each array once.
//
// Included once by each kernels_<set>.cc. Internal linkage throughout: see Note [One definition
// rule and instruction sets].
//
// Note [Torch's rounding]
// A step rounds where torch's unfused classes do (their loop over single tensors, neither
// capturable nor differentiable): one rounding after each of torch's operators, of which these
// compute a multiplication and an addition with a single rounding on processors that can:
//
//   a.add(b, alpha=s)         fused(b, s, a)
//   a.lerp(b, w)              fused(b - a, w, a) for |w| < 0.5, else fused(b - a, w - 1, b)
//   a.addcmul(b, c, value=s)  fused(s * b, c, a)
//
// and `a.addcdiv(b, c, value=s)` is a + (s * b) / c. So where torch takes square roots correctly
// rounded, a step equals its step bit for bit. Its builds for x86-64 take them from a library whose
// result may be the float beside: then Adam's states still equal torch's, and its parameters are
// within 2 ulp of the update of torch's.

#pragma once

#include <type_traits>  // remove_reference_t, a type alone

#include "kernels/cpu/convert_kernels.inc.h"
#include "kernels/cpu/optimizer_step_job.h"
#include "kernels/cpu/simd.inc.h"

namespace pydist::kernels {
namespace {

template <typename V>
struct Two {
  V low;
  V high;
};

// ---- formats ------------------------------------------------------------------------------
// read and write move as many elements as two vectors of values hold, or the first `count` of them.

// float or double, in their own precision.
template <typename Element>
struct Exact {
  using V = Vector<Element>;
  static constexpr std::size_t kElementBytes = sizeof(Element);

  static PYDIST_INLINE Two<V> read(const unsigned char* from) {
    return {(V)load(from), (V)load(from + kVectorBytes)};
  }
  static PYDIST_INLINE Two<V> read(const unsigned char* from, std::size_t count) {
    const std::size_t bytes = count * kElementBytes;
    if (bytes >= kVectorBytes) {
      return {(V)load(from), (V)load_partial(from + kVectorBytes, bytes - kVectorBytes)};
    }
    return {(V)load_partial(from, bytes), V{}};
  }
  static PYDIST_INLINE void write(unsigned char* to, Two<V> values) {
    store(to, (Raw)values.low);
    store(to + kVectorBytes, (Raw)values.high);
  }
  static PYDIST_INLINE void write(unsigned char* to, Two<V> values, std::size_t count) {
    const std::size_t bytes = count * kElementBytes;
    if (bytes >= kVectorBytes) {
      store(to, (Raw)values.low);
      store_partial(to + kVectorBytes, (Raw)values.high, bytes - kVectorBytes);
    } else {
      store_partial(to, (Raw)values.low, bytes);
    }
  }
};

// 16 bits, computed with in float32.
template <typename InOrder>
struct Rounded {
  static constexpr std::size_t kElementBytes = 2;

  static PYDIST_INLINE Two<F32> widen(Raw raw) {
    const Pair pair = InOrder::widen(raw);
    return {pair.low, pair.high};
  }
  static PYDIST_INLINE Two<F32> read(const unsigned char* from) { return widen(load(from)); }
  static PYDIST_INLINE Two<F32> read(const unsigned char* from, std::size_t count) {
    return widen(load_partial(from, count * kElementBytes));
  }
  static PYDIST_INLINE void write(unsigned char* to, Two<F32> values) {
    store(to, InOrder::narrow({values.low, values.high}));
  }
  static PYDIST_INLINE void write(unsigned char* to, Two<F32> values, std::size_t count) {
    store_partial(to, InOrder::narrow({values.low, values.high}), count * kElementBytes);
  }

  // The values of a parameter whose master copy is given: its own where they are not the copy's,
  // rounded, because somebody has written them since.
  template <typename... Count>
  static PYDIST_INLINE Two<F32> current(const unsigned char* parameter, Two<F32> master,
                                        Count... count) {
    const Two<F32> given = read(parameter, count...);
    const Two<F32> kept = widen(InOrder::narrow({master.low, master.high}));
    return {given.low == kept.low ? master.low : given.low,
            given.high == kept.high ? master.high : given.high};
  }
};

// Where the values are the parameter, there is nothing else to read or write.
struct Absent {
  static constexpr std::size_t kElementBytes = 0;

  template <typename V, typename... Count>
  static PYDIST_INLINE Two<V> current(const unsigned char*, Two<V> values, Count...) {
    return values;
  }

  template <typename V, typename... Count>
  static PYDIST_INLINE void write(unsigned char*, Two<V>, Count...) {}
};

// ---- rules --------------------------------------------------------------------------------
// apply() turns the value and the states of some elements into the next ones. Branches depend on
// the step alone, never on an element.

template <typename V>
PYDIST_INLINE V all(double factor) {
  using Element = std::remove_reference_t<decltype(V{}[0])>;
  return static_cast<Element>(factor) - V{};  // which keeps -0, too
}

template <typename V, std::size_t kStateCount>
struct Adam {
  static constexpr std::size_t kStates = kStateCount;  // 3 with amsgrad

  explicit Adam(const AdamFactors& factors)
      : gradient_scale(all<V>(factors.gradient_scale)),
        parameter_decay(all<V>(factors.parameter_decay)),
        gradient_decay(all<V>(factors.gradient_decay)),
        first_weight(all<V>(factors.first_weight)),
        beta2(all<V>(factors.beta2)),
        second_weight(all<V>(factors.second_weight)),
        correction_root(all<V>(factors.correction_root)),
        epsilon(all<V>(factors.epsilon)),
        negative_step_size(all<V>(factors.negative_step_size)),
        decays_gradient(factors.gradient_decay != 0),
        leans_on_average(first_weight[0] < 0.5) {
    if (!leans_on_average) {
      first_weight = first_weight - 1;
    }
  }

  PYDIST_INLINE void apply(V gradient, V& value, V* states) const {
    gradient = gradient * gradient_scale;
    value = value * parameter_decay;
    if (decays_gradient) {
      gradient = fused(value, gradient_decay, gradient);
    }
    const V base = leans_on_average ? states[0] : gradient;
    states[0] = canonical(fused(gradient - states[0], first_weight, base));
    states[1] = canonical(fused(gradient * second_weight, gradient, states[1] * beta2));
    V square = states[1];
    if constexpr (kStates == 3) {
      square = canonical(((square > states[2]) | (square != square)) ? square : states[2]);
      states[2] = square;
    }
    const V denominator = root(square) / correction_root + epsilon;
    value = canonical(value + (states[0] * negative_step_size) / denominator);
  }

  V gradient_scale;
  V parameter_decay;
  V gradient_decay;
  V first_weight;
  V beta2;
  V second_weight;
  V correction_root;
  V epsilon;
  V negative_step_size;
  bool decays_gradient;
  bool leans_on_average;
};

template <typename V, std::size_t kStateCount>
struct Sgd {
  static constexpr std::size_t kStates = kStateCount;  // 1 with momentum

  explicit Sgd(const SgdFactors& factors)
      : gradient_scale(all<V>(factors.gradient_scale)),
        gradient_decay(all<V>(factors.gradient_decay)),
        momentum(all<V>(factors.momentum)),
        gradient_weight(all<V>(factors.gradient_weight)),
        negative_lr(all<V>(factors.negative_lr)),
        decays_gradient(factors.gradient_decay != 0),
        nesterov(factors.nesterov),
        begins(factors.begins) {}

  PYDIST_INLINE void apply(V gradient, V& value, V* states) const {
    gradient = gradient * gradient_scale;
    if (decays_gradient) {
      gradient = fused(value, gradient_decay, gradient);
    }
    if constexpr (kStates == 1) {
      const V next = begins ? gradient : fused(gradient, gradient_weight, states[0] * momentum);
      states[0] = canonical(next);
      gradient = nesterov ? fused(next, momentum, gradient) : next;
    }
    value = canonical(fused(gradient, negative_lr, value));
  }

  V gradient_scale;
  V gradient_decay;
  V momentum;
  V gradient_weight;
  V negative_lr;
  bool decays_gradient;
  bool nesterov;
  bool begins;
};

// Reads and writes what a step does, and computes nothing: what memory alone takes.
template <typename V, std::size_t kStateCount>
struct Traffic {
  static constexpr std::size_t kStates = kStateCount;

  PYDIST_INLINE void apply(V gradient, V& value, V* states) const {
    keep(gradient);
    keep(value);
    for (std::size_t i = 0; i < kStates; ++i) {
      keep(states[i]);
    }
  }

  // The compiler can't know that nothing changes, so it stores the value again.
  static PYDIST_INLINE void keep(V& value) {
#if defined(__x86_64__)
    asm volatile("" : "+v"(value));
#elif defined(__aarch64__)
    asm volatile("" : "+w"(value));
#else
    asm volatile("" : "+m"(value));
#endif
  }
};

// ---- walking ------------------------------------------------------------------------------

// How far ahead of a stop its arrays are asked for. A step walks up to seven arrays at once, more
// than the prefetchers of some processors keep apart, and they end at every page.
constexpr std::size_t kAheadBytes = 1024;

// Asks for the next stop's lines of an array whose this stop's are at `from`; an address beyond the
// end does no harm.
template <std::size_t kBytes>
PYDIST_INLINE void fetch_ahead(const unsigned char* from) {
  constexpr std::size_t kLineBytes = 64;
  for (std::size_t at = 0; at < kBytes; at += kLineBytes) {
    __builtin_prefetch(from + kAheadBytes + at);
  }
}

// One stop at element `at`; `count`, if given, is how many elements are left.
template <typename V, typename Values, typename Gradient, typename Output, typename Rule,
          typename... Count>
PYDIST_INLINE void step_at(const Rule& rule, const StepJob& job, std::size_t at, Count... count) {
  const auto* const gradient = static_cast<const unsigned char*>(job.gradient);
  auto* const values = static_cast<unsigned char*>(job.values) + at * Values::kElementBytes;
  unsigned char* states[Rule::kStates + 1] = {};
  Two<V> read[Rule::kStates + 1];
  V low[Rule::kStates + 1];
  V high[Rule::kStates + 1];
  const Two<V> slope = Gradient::read(gradient + at * Gradient::kElementBytes, count...);
  auto* const parameter = static_cast<unsigned char*>(job.rounded) + at * Output::kElementBytes;
  Two<V> value = Output::current(parameter, Values::read(values, count...), count...);
  for (std::size_t i = 0; i < Rule::kStates; ++i) {
    states[i] = static_cast<unsigned char*>(job.states[i]) + at * Values::kElementBytes;
    read[i] = Values::read(states[i], count...);
    low[i] = read[i].low;
    high[i] = read[i].high;
  }
  rule.apply(slope.low, value.low, low);
  rule.apply(slope.high, value.high, high);
  Values::write(values, value, count...);
  for (std::size_t i = 0; i < Rule::kStates; ++i) {
    Values::write(states[i], {low[i], high[i]}, count...);
  }
  Output::write(parameter, value, count...);
}

template <typename Values, typename Gradient, typename Output, typename Rule, std::size_t kStride>
PYDIST_INLINE void fetch_all_ahead(const StepJob& job, std::size_t at) {
  const auto fetch = [at]<typename Format>(const void* array, Format) {
    if constexpr (Format::kElementBytes > 0) {
      fetch_ahead<kStride * Format::kElementBytes>(static_cast<const unsigned char*>(array) +
                                                   at * Format::kElementBytes);
    }
  };
  fetch(job.gradient, Gradient{});
  fetch(job.values, Values{});
  fetch(job.rounded, Output{});
  for (std::size_t i = 0; i < Rule::kStates; ++i) {
    fetch(job.states[i], Values{});
  }
}

template <typename V, typename Values, typename Gradient, typename Output, typename Rule>
void step_all(const Rule& given_rule, const StepJob& given_job) {
  // Copies, which no store to the arrays can change for all that the compiler knows: they stay in
  // registers.
  const Rule rule = given_rule;
  const StepJob job = given_job;
  constexpr std::size_t kStride = 2 * kVectorBytes / Values::kElementBytes;
  std::size_t at = 0;
  for (; job.count - at >= kStride; at += kStride) {
    fetch_all_ahead<Values, Gradient, Output, Rule, kStride>(job, at);
    step_at<V, Values, Gradient, Output>(rule, job, at);
  }
  if (at < job.count) {
    step_at<V, Values, Gradient, Output>(rule, job, at, job.count - at);
  }
}

template <typename Gradient, typename Rule>
void step_to(const Rule& rule, const StepJob& job) {
  if (job.rounded == nullptr) {
    step_all<F32, Exact<float>, Gradient, Absent>(rule, job);
  } else if (job.rounded_dtype == DType::kBFloat16) {
    step_all<F32, Exact<float>, Gradient, Rounded<BFloat16InOrder>>(rule, job);
  } else {
    step_all<F32, Exact<float>, Gradient, Rounded<Float16InOrder>>(rule, job);
  }
}

// `Rule<V, kStates>` is made from `factors`.
template <template <typename, std::size_t> typename Rule, std::size_t kStates, typename... Factors>
void step_here(const StepJob& job, const Factors&... factors) {
  if (job.dtype == DType::kFloat64) {
    const Rule<F64, kStates> rule(factors...);
    step_all<F64, Exact<double>, Exact<double>, Absent>(rule, job);
    return;
  }
  const Rule<F32, kStates> rule(factors...);
  switch (job.gradient_dtype) {
    case DType::kBFloat16:
      step_to<Rounded<BFloat16InOrder>>(rule, job);
      break;
    case DType::kFloat16:
      step_to<Rounded<Float16InOrder>>(rule, job);
      break;
    default:
      step_to<Exact<float>>(rule, job);
  }
}

void adam_step_here(const AdamFactors& factors, const StepJob& job) noexcept {
  if (factors.amsgrad) {
    step_here<Adam, 3>(job, factors);
  } else {
    step_here<Adam, 2>(job, factors);
  }
}

void sgd_step_here(const SgdFactors& factors, const StepJob& job) noexcept {
  if (factors.momentum != 0) {
    step_here<Sgd, 1>(job, factors);
  } else {
    step_here<Sgd, 0>(job, factors);
  }
}

void step_traffic_here(std::size_t state_count, const StepJob& job) noexcept {
  switch (state_count) {
    case 0:
      return step_here<Traffic, 0>(job);
    case 1:
      return step_here<Traffic, 1>(job);
    case 2:
      return step_here<Traffic, 2>(job);
    default:
      return step_here<Traffic, 3>(job);
  }
}

}  // namespace
}  // namespace pydist::kernels
