// One reduction as the compiled kernels take it: plain data, already validated.
//
// Ownership: borrows everything. Thread safety: the kernels share no state.
//
// Note [One definition rule and instruction sets]
// The kernels are compiled once for every instruction set, from one source. Had two of those
// objects an inline function in common, say a member of std::vector, then the linker would keep
// one copy of the two, maybe the one with AVX-512 in it, and everybody would run that copy, also
// on processors without AVX-512. So those objects define nothing with external linkage but the
// entry points below, call nothing inline of the standard library, and this header holds data
// alone.

#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "base/reduce_op.h"

namespace pydist::kernels {

struct ReduceJob {
  DType dtype;
  ReduceOp op;
  double divisor;
  const double* factors;  // input_count of them for kPremulSum, else unused
  const void* const* inputs;
  std::size_t input_count;  // >= 1
  void* const* outputs;
  std::size_t output_count;  // >= 1
  std::size_t count;         // elements
  bool streaming;
};

void reduce_portable(const ReduceJob& job) noexcept;
void copy_streaming_portable(void* output, const void* input, std::size_t bytes) noexcept;
void widen_portable(DType from, const void* input, float* output, std::size_t count) noexcept;
void narrow_portable(DType to, const float* input, void* output, std::size_t count) noexcept;

#if defined(__x86_64__)
void reduce_avx2(const ReduceJob& job) noexcept;
void copy_streaming_avx2(void* output, const void* input, std::size_t bytes) noexcept;
void widen_avx2(DType from, const void* input, float* output, std::size_t count) noexcept;
void narrow_avx2(DType to, const float* input, void* output, std::size_t count) noexcept;

void reduce_avx512(const ReduceJob& job) noexcept;
void copy_streaming_avx512(void* output, const void* input, std::size_t bytes) noexcept;
void widen_avx512(DType from, const void* input, float* output, std::size_t count) noexcept;
void narrow_avx512(DType to, const float* input, void* output, std::size_t count) noexcept;
#elif defined(__aarch64__)
void reduce_neon(const ReduceJob& job) noexcept;
void copy_streaming_neon(void* output, const void* input, std::size_t bytes) noexcept;
void widen_neon(DType from, const void* input, float* output, std::size_t count) noexcept;
void narrow_neon(DType to, const float* input, void* output, std::size_t count) noexcept;
#endif

}  // namespace pydist::kernels
