// The C interface of libpydist_cuda.so: the element-wise kernels on CUDA devices.
//
// The library is built where nvcc is found, links the CUDA runtime statically and neither torch nor
// the engine, and is opened at run time (library.h). So one build of the module serves
// machines with and without CUDA. This header needs no CUDA: a stream is a cudaStream_t, an error a
// cudaError_t; both are what torch hands out.
//
// Every launching function
//   - works on the current device, which must be that of the stream and of the buffers;
//   - only enqueues: it never waits for the device, allocates nothing, and may be captured in a
//   CUDA
//     graph. What a descriptor points to on the host may go when it returns, buffers on the device
//     not before the stream is through;
//   - returns 0, or the cudaError_t of the launch; cudaErrorInvalidValue (1) where arguments.h
//     finds a fault in the descriptor. Nothing is enqueued then.
// Thread safe, like the CUDA runtime.
//
// Buffers may have any alignment of at least one element (complex: of one part) and any count up to
// 2^40; where all of a call are aligned alike they are moved 16 bytes at a time. An output may be
// the very same buffer as an input; otherwise no two overlap.

#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/reduce_op.h"

// Raised with every change of this header that an older caller or library would not understand.
#define PYDIST_CUDA_ABI_VERSION 5

// The functions in the order of their declaration, for what treats them alike.
#define PYDIST_CUDA_FUNCTIONS(apply)                                                          \
  apply(abi_version) apply(targets) apply(error_text) apply(device_count) apply(load_kernels) \
      apply(reduce) apply(convert) apply(adam) apply(sgd)

#pragma GCC visibility push(default)
extern "C" {

// ---- the library --------------------------------------------------------------------------

// PYDIST_CUDA_ABI_VERSION of the library. Needs no driver, as `targets` and `error_text` don't.
int pydist_cuda_abi_version();

// What the library was compiled for, such as "75-virtual 75-real 80-real".
const char* pydist_cuda_targets();

const char* pydist_cuda_error_text(int error);

// Sets *count to the number of usable devices, 0 where it fails: 35 without a (recent) driver.
// Starts the driver in this process; one that forks must not call it before.
int pydist_cuda_device_count(int* count);

// Loads every kernel onto the current device. CUDA loads them lazily otherwise, at the first
// launch, and may wait there for kernels that run; where those wait for another rank that is a
// deadlock. So call it before the first communication.
int pydist_cuda_load_kernels();

// ---- reductions ---------------------------------------------------------------------------

// A result of NCCL, or a step of the ring: what has come, and what this rank has.
inline constexpr std::uint32_t kPydistCudaMostInputs = 2;

// output[i] = op(inputs[0][i], inputs[1][i]) for i in [0, count), or op(inputs[0][i]).
//
// The bits are those of cpu/reduce.h: 16-bit types accumulate in float32 and are rounded once, a
// mean is divided once before that, NaN is canonical. Either all inputs and the output have one
// dtype, any for which is_supported(op, dtype); or they are any mixture of float32, float16 and
// bfloat16, accumulated in float32, for every op of floating point.
struct PydistCudaReduce {
  const void* const* inputs;          // on the host: input_count pointers to the device
  const pydist::DType* input_dtypes;  // on the host: one for each input
  const double* factors;              // on the host, premul_sum only: one for each input
  void* output;
  std::uint64_t count;  // elements
  double divisor;       // mean only
  std::uint32_t input_count;
  pydist::ReduceOp op;
  pydist::DType output_dtype;
  // kFloat16 or kBFloat16: float32 inputs are rounded to it before anything else, and a float32
  // result after everything else, as if they had travelled in it. kFloat32: nothing of the kind.
  pydist::DType wire_dtype;
};

int pydist_cuda_reduce(const PydistCudaReduce* reduce, void* stream);

// ---- segments: conversion, packing, unpacking ---------------------------------------------

// to[i] = from[i] * scale for i in [0, count), converted.
struct PydistCudaSegment {
  const void* from;
  void* to;  // may be `from` where the dtypes are as wide
  std::uint64_t count;
  pydist::DType from_dtype;
  pydist::DType to_dtype;
};

// One launch for some hundred segments, so a bucket is packed (`to` inside a flat buffer) or
// unpacked (`from` inside it) in few.
//
// Between float64, float32, float16 and bfloat16, one rounding to nearest, ties to even; with a
// scale another one before, the product's, in float64 where either side is that, else in float32.
// Every other dtype only to itself and without scale, bit for bit; floating point of one dtype
// without scale is copied bit for bit too. NaN is canonical where anything is computed.
struct PydistCudaConvert {
  const PydistCudaSegment* segments;  // on the host
  std::uint64_t segment_count;
  double scale;  // 1 for none
  // On the device, where they are read as the kernel runs: a further factor, and by what that is
  // divided. Where either is 0, whatever `from` holds becomes 0, NaN too. Null for none; there is
  // no divisor without a factor.
  const double* device_scale = nullptr;
  const double* device_divisor = nullptr;
};

int pydist_cuda_convert(const PydistCudaConvert* convert, void* stream);

// ---- optimizer steps ----------------------------------------------------------------------

// What Adam and SGD have in common. A parameter apart from its master that holds another value than
// the master's, rounded, has been written since the last step, which starts from it. Arithmetic is
// in float32 throughout, without fused multiply-adds; the gradient is widened, then multiplied by
// the scale.
struct PydistCudaStep {
  double lr;
  double weight_decay;
  double gradient_scale;  // 1 for none
  std::uint8_t maximize;  // 0 or 1
  // A number on the device: where it is not 0, nothing changes. Null for 0.
  const float* found_inf = nullptr;
};

struct PydistCudaAdamSegment {
  const void* gradient;
  float* master;  // the parameter in float32
  float* exp_avg;
  float* exp_avg_sq;
  float* max_exp_avg_sq;  // amsgrad only
  void* parameter;        // the master's values in the model's dtype; null: the master is it
  std::uint64_t count;
  pydist::DType gradient_dtype;   // float32, float16 or bfloat16
  pydist::DType parameter_dtype;  // float32, float16 or bfloat16
};

// torch.optim.Adam and AdamW, without foreach or fused: the same formulas in the same order.
struct PydistCudaAdam {
  const PydistCudaAdamSegment* segments;  // on the host
  std::uint64_t segment_count;
  PydistCudaStep common;
  double beta1;
  double beta2;
  double eps;
  std::uint64_t step;                   // that is taken: 1, 2, ...
  std::uint8_t decoupled_weight_decay;  // 1: AdamW
  std::uint8_t amsgrad;
};

int pydist_cuda_adam(const PydistCudaAdam* adam, void* stream);

struct PydistCudaSgdSegment {
  const void* gradient;
  float* master;    // the parameter in float32
  float* momentum;  // the buffer; null where momentum is 0
  void* parameter;  // the master's values in the model's dtype; null: the master is it
  std::uint64_t count;
  pydist::DType gradient_dtype;   // float32, float16 or bfloat16
  pydist::DType parameter_dtype;  // float32, float16 or bfloat16
};

// torch.optim.SGD, without foreach or fused.
struct PydistCudaSgd {
  const PydistCudaSgdSegment* segments;  // on the host
  std::uint64_t segment_count;
  PydistCudaStep common;
  double momentum;
  double dampening;
  std::uint8_t nesterov;
  std::uint8_t first_step;  // 1: the momentum buffers are written, not read
};

int pydist_cuda_sgd(const PydistCudaSgd* sgd, void* stream);

}  // extern "C"
#pragma GCC visibility pop
