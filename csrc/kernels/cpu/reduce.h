// Element-wise reduction of n inputs into one or more outputs, on the CPU.
//
// Every element is combined in the order of `inputs`, so a result depends on the values alone and
// never on the instruction set, the alignment or how the caller cut the buffer into pieces:
//   - float16 and bfloat16 accumulate in float32 and are rounded once, at the store
//     (round to nearest, ties to even);
//   - float32, float64 and the complex types accumulate in their own precision, and no kernel
//     contracts a multiplication and an addition into one rounding;
//   - kMean divides the sum once, in the accumulator's precision, before the store;
//   - kPremulSum multiplies input i by factors[i] in the accumulator's precision, then adds;
//   - kMin and kMax return NaN where any input is NaN, and the first of equal values (-0 and +0
//     are equal);
//   - a NaN that is stored is always the positive quiet one without payload, from one input too;
//   - complex products follow the plain formula, without recovery of infinities;
//   - integer sums and products wrap around; bool sums are a logical or, products a logical and.
//
// The instruction set (AVX-512, AVX2, NEON or the portable one) is chosen once, at run time.
// Thread safe: the functions share no state.

#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/enum_names.h"
#include "base/reduce_op.h"

namespace pydist {

// An instruction set that the kernels were compiled for. Tests compare them with each other.
enum class InstructionSet { kPortable, kAvx2, kAvx512, kNeon };

inline constexpr std::array<std::string_view, 4> kInstructionSetNames = {"portable", "avx2",
                                                                         "avx512", "neon"};

[[nodiscard]] constexpr std::string_view to_string(InstructionSet set) noexcept {
  return name_in(kInstructionSetNames, set, "unknown instruction set");
}

// Those that this processor can run, the fastest last. PYDIST_CPU_ISA caps the choice.
[[nodiscard]] std::vector<InstructionSet> usable_instruction_sets();

struct Reduction {
  DType dtype;
  ReduceOp op;
  // kMean only: the sum is divided by this.
  double divisor = 1.0;
  // kPremulSum only: one factor for each input.
  std::span<const double> factors = {};
};

// Whether stores may bypass the cache. Worth it only for outputs that do not fit there; without
// effect where every output is also an input, since those lines are in the cache anyway.
enum class StoreHint { kCached, kStreaming };

// outputs[k][i] = op(inputs[0][i], inputs[1][i], ...) for i in [0, count) and every k.
//
// At least one input and one output. An output may be the very same buffer as an input (in
// place); otherwise no two buffers overlap. Any alignment of at least one element.
// Throws InvalidUsage, before anything is written, unless is_supported(reduction.op,
// reduction.dtype) and there are enough buffers and factors. `set` is for tests and benchmarks; by
// default the fastest usable one.
void reduce(const Reduction& reduction, std::span<const void* const> inputs,
            std::span<void* const> outputs, std::size_t count, StoreHint hint = StoreHint::kCached,
            std::optional<InstructionSet> set = {});

// Copies bytes; kStreaming bypasses the cache on the way out. The buffers do not overlap.
void copy_bytes(void* output, const void* input, std::size_t bytes,
                StoreHint hint = StoreHint::kCached);

}  // namespace pydist
