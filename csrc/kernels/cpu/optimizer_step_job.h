// One optimizer step on one segment as the compiled kernels take it: plain data, already validated.
//
// Ownership: borrows everything. Thread safety: the kernels share no state. The rules of Note [One
// definition rule and instruction sets] hold here too.

#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "kernels/cpu/update_factors.h"

namespace pydist::kernels {

struct StepJob {
  // float32 or float64: of `values` and of the states.
  DType dtype;
  // float32, bfloat16 or float16 where `dtype` is float32, else float64.
  DType gradient_dtype;
  void* values;          // the parameter, or its master copy
  const void* gradient;  //
  // The parameter in float16 or bfloat16: the rounded values, unless written since; null where
  // `values` is the parameter itself.
  void* rounded;
  DType rounded_dtype;
  // Adam: exp_avg, exp_avg_sq, and with amsgrad max_exp_avg_sq. SGD: the momentum buffer, if any.
  void* states[3];
  std::size_t count;  // elements
};

void adam_step_portable(const AdamFactors& factors, const StepJob& job) noexcept;
void sgd_step_portable(const SgdFactors& factors, const StepJob& job) noexcept;
void step_traffic_portable(std::size_t state_count, const StepJob& job) noexcept;

#if defined(__x86_64__)
void adam_step_avx2(const AdamFactors& factors, const StepJob& job) noexcept;
void sgd_step_avx2(const SgdFactors& factors, const StepJob& job) noexcept;
void step_traffic_avx2(std::size_t state_count, const StepJob& job) noexcept;

void adam_step_avx512(const AdamFactors& factors, const StepJob& job) noexcept;
void sgd_step_avx512(const SgdFactors& factors, const StepJob& job) noexcept;
void step_traffic_avx512(std::size_t state_count, const StepJob& job) noexcept;
#elif defined(__aarch64__)
void adam_step_neon(const AdamFactors& factors, const StepJob& job) noexcept;
void sgd_step_neon(const SgdFactors& factors, const StepJob& job) noexcept;
void step_traffic_neon(std::size_t state_count, const StepJob& job) noexcept;
#endif

}  // namespace pydist::kernels
