#include "kernels/cpu/optimizer_step.h"

#include <cstddef>
#include <type_traits>

#include "base/error.h"
#include "kernels/cpu/instruction_set.h"

namespace pydist {
namespace {

std::size_t state_count_of(const AdamFactors& factors) { return factors.amsgrad ? 3 : 2; }
std::size_t state_count_of(const SgdFactors& factors) { return factors.momentum != 0 ? 1 : 0; }

// DType::kFloat32 or kFloat64.
DType values_dtype(const StepSegment& segment) {
  return segment.master != nullptr ? DType::kFloat32 : segment.parameter_dtype;
}

kernels::StepJob job_of(const StepSegment& segment, std::size_t state_count) {
  require_step_types(segment.parameter_dtype, segment.gradient_dtype, segment.master != nullptr);
  PYDIST_CHECK(segment.parameter != nullptr && segment.gradient != nullptr);
  for (std::size_t i = 0; i < state_count; ++i) {
    PYDIST_CHECK(segment.states[i] != nullptr);
  }
  const bool has_master = segment.master != nullptr;
  return {
      .dtype = values_dtype(segment),
      .gradient_dtype = segment.gradient_dtype,
      .values = has_master ? segment.master : segment.parameter,
      .gradient = segment.gradient,
      .rounded = has_master ? segment.parameter : nullptr,
      .rounded_dtype = segment.parameter_dtype,
      .states = {segment.states[0], segment.states[1], segment.states[2]},
      .count = segment.count,
  };
}

template <typename Void>
Void* advance(Void* array, std::size_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
  return array == nullptr ? nullptr : static_cast<Byte*>(array) + bytes;
}

}  // namespace

StepSegment StepSegment::part(std::size_t begin, std::size_t part_count) const {
  const std::size_t value_bytes = begin * element_size(values_dtype(*this));
  StepSegment cut = *this;
  cut.parameter = advance(parameter, begin * element_size(parameter_dtype));
  cut.gradient = advance(gradient, begin * element_size(gradient_dtype));
  cut.master = advance(master, value_bytes);
  for (void*& state : cut.states) {
    state = advance(state, value_bytes);
  }
  cut.count = part_count;
  return cut;
}

void require_step_types(DType parameter, DType gradient, bool has_master) {
  const bool is_16_bit = is_16_bit_float(parameter);
  const bool is_wide = parameter == DType::kFloat32 || parameter == DType::kFloat64;
  if (!is_16_bit && !is_wide) {
    throw InvalidUsage(
        join("The fused optimizer step takes float16, bfloat16, float32 and float64 "
             "parameters, not ",
             to_string(parameter)));
  }
  if (is_16_bit != has_master) {
    throw InvalidUsage(
        is_16_bit ? join("The fused optimizer step of a ", to_string(parameter),
                         " parameter needs a float32 master copy of it")
                  : join("The fused optimizer step of a ", to_string(parameter),
                         " parameter takes no master copy: the parameter holds all its bits"));
  }
  const bool fits = parameter == DType::kFloat64
                        ? gradient == DType::kFloat64
                        : gradient == DType::kFloat32 || is_16_bit_float(gradient);
  if (!fits) {
    throw InvalidUsage(join(
        "The fused optimizer step of a ", to_string(parameter), " parameter takes a gradient in ",
        parameter == DType::kFloat64 ? "float64" : "float32, bfloat16 or float16", ", not in ",
        to_string(gradient)));
  }
}

void adam_step(const AdamFactors& factors, const StepSegment& segment,
               std::optional<InstructionSet> set) {
  if (segment.count > 0) {
    kernels::kernel_set(set).adam_step(factors, job_of(segment, state_count_of(factors)));
  }
}

void sgd_step(const SgdFactors& factors, const StepSegment& segment,
              std::optional<InstructionSet> set) {
  if (segment.count > 0) {
    kernels::kernel_set(set).sgd_step(factors, job_of(segment, state_count_of(factors)));
  }
}

void step_traffic(std::size_t state_count, const StepSegment& segment,
                  std::optional<InstructionSet> set) {
  if (segment.count > 0) {
    kernels::kernel_set(set).step_traffic(state_count, job_of(segment, state_count));
  }
}

}  // namespace pydist
