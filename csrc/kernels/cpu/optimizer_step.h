// One optimizer step in one pass over memory, on the CPU: reads the reduced gradient, updates the
// values and the optimizer's states, and writes the parameter in the model's type.
//
// Values and states are float32 or float64. A parameter in 16 bits has a master copy in float32 and
// gets its values rounded once (to nearest, ties to even). Where it holds another value than its
// copy's, rounded, somebody has written that since the last step, and the step starts from it. Any
// other parameter holds the values itself. The gradient may be float32, bfloat16 or float16 where
// the values are float32, and is float64 where they are float64. It is widened exactly, then
// multiplied by the factor that the caller gives: the inverse of a loss scale, a clipping
// coefficient, or their product.
//
// Every element rounds as torch's unfused classes do, see Note [Torch's rounding], whatever the
// instruction set, the alignment and the pieces into which a caller cuts a segment, which may
// therefore be spread over threads. A NaN that is stored is the positive quiet one.
// Thread safe: the functions share no state.

#pragma once

#include <cstddef>
#include <optional>

#include "base/dtype.h"
#include "kernels/cpu/reduce.h"
#include "kernels/cpu/update_factors.h"

namespace pydist {

// A run of elements: of one parameter, or the part of it that lies in this rank's shard. No two of
// the arrays overlap. Any alignment of at least one element.
struct StepSegment {
  DType parameter_dtype = DType::kFloat32;
  DType gradient_dtype = DType::kFloat32;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  // float32; null where the parameter is float32 or float64, and then must be.
  void* master = nullptr;
  // As many as the rule has, in its order. Adam: exp_avg, exp_avg_sq, and with amsgrad
  // max_exp_avg_sq. SGD with momentum: the momentum buffer.
  void* states[3] = {};
  std::size_t count = 0;

  // Elements [begin, begin + count) of it.
  [[nodiscard]] StepSegment part(std::size_t begin, std::size_t count) const;
};

// Throws InvalidUsage unless the kernels take these types together.
void require_step_types(DType parameter, DType gradient, bool has_master);

// Throw InvalidUsage, before anything is written, where the types do not fit or an array is
// missing. `set` is for tests and benchmarks; by default the fastest usable one.
void adam_step(const AdamFactors& factors, const StepSegment& segment,
               std::optional<InstructionSet> set = {});
void sgd_step(const SgdFactors& factors, const StepSegment& segment,
              std::optional<InstructionSet> set = {});

// Reads and writes all that a step of a rule with `state_count` states would, and changes no value
// but that of a master copy whose parameter was written: what the step would take if arithmetic
// were free.
void step_traffic(std::size_t state_count, const StepSegment& segment,
                  std::optional<InstructionSet> set = {});

}  // namespace pydist
