// Starting a kernel: geometry from what the device is, errors as cudaError_t.
//
// A kernel is a type with Params, its one argument, and
//   static void run(const Params&, Place)
// which one thread executes. Compiled without CUDA, as the C++ tests do, a launch is a loop over
// all threads, so everything but the hardware is tested where there is none.

#pragma once

#include <cstdint>

#include "kernels/cuda/elements.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>

#include <atomic>
#endif

namespace pydist::cuda {

constexpr unsigned kBlockThreads = 256;

// Where a thread is. Blocks share work tile by tile: a block takes every `blocks`th.
struct Place {
  std::uint64_t block;
  std::uint64_t blocks;
  unsigned thread;  // of kBlockThreads
};

#if defined(__CUDACC__)

// Params stay in constant memory, also where they are indexed at run time.
template <typename Kernel>
__global__ void __launch_bounds__(kBlockThreads)
    run_kernel(const __grid_constant__ typename Kernel::Params params) {
  Kernel::run(params, {blockIdx.x, gridDim.x, threadIdx.x});
}

// A failed call leaves its error for the next one who asks; nobody else shall find ours.
inline int cleared(cudaError_t error) {
  if (error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
  }
  return static_cast<int>(error);
}

// Blocks of `kernel` that the current device runs at once, found out once for each device.
template <typename Kernel>
int blocks_at_once(std::uint64_t* blocks) {
  constexpr int kRememberedDevices = 64;
  static std::atomic<std::uint32_t> remembered[kRememberedDevices];
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) {
    return cleared(error);
  }
  const bool is_remembered = device < kRememberedDevices;
  if (is_remembered) {
    *blocks = remembered[device].load(std::memory_order_relaxed);
    if (*blocks != 0) {
      return 0;
    }
  }
  int processors = 0;
  int blocks_each = 0;
  cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_each, run_kernel<Kernel>,
                                                          kBlockThreads, /*dynamicSMemSize=*/0);
  }
  if (error != cudaSuccess) {
    return cleared(error);
  }
  *blocks = static_cast<std::uint64_t>(processors) * (blocks_each > 0 ? blocks_each : 1);
  if (is_remembered) {
    remembered[device].store(static_cast<std::uint32_t>(*blocks), std::memory_order_relaxed);
  }
  return 0;
}

template <typename Kernel>
int launch_blocks(const typename Kernel::Params& params, std::uint64_t blocks, void* stream) {
  void* arguments[] = {const_cast<typename Kernel::Params*>(&params)};
  return cleared(cudaLaunchKernel(reinterpret_cast<const void*>(run_kernel<Kernel>),
                                  dim3(static_cast<unsigned>(blocks)), dim3(kBlockThreads),
                                  arguments, /*sharedMem=*/0, static_cast<cudaStream_t>(stream)));
}

// Puts a kernel onto the current device.
template <typename Kernel>
int load_kernel() {
  cudaFuncAttributes attributes{};
  return cleared(
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(run_kernel<Kernel>)));
}

#else

template <typename Kernel>
int launch_blocks(const typename Kernel::Params& params, std::uint64_t blocks, void*) {
  for (std::uint64_t block = 0; block < blocks; ++block) {
    for (unsigned thread = 0; thread < kBlockThreads; ++thread) {
      Kernel::run(params, {block, blocks, thread});
    }
  }
  return 0;
}

// Few enough that several tiles come to each.
template <typename Kernel>
int blocks_at_once(std::uint64_t* blocks) {
  *blocks = 3;
  return 0;
}

template <typename Kernel>
int load_kernel() {
  return 0;
}

#endif

// `tiles` > 0 pieces of work, shared by no more blocks than run at once.
template <typename Kernel>
int launch(const typename Kernel::Params& params, std::uint64_t tiles, void* stream) {
  std::uint64_t blocks = 0;
  if (const int error = blocks_at_once<Kernel>(&blocks); error != 0) {
    return error;
  }
  return launch_blocks<Kernel>(params, tiles < blocks ? tiles : blocks, stream);
}

// cudaErrorInvalidValue.
constexpr int kInvalidValue = 1;

}  // namespace pydist::cuda
