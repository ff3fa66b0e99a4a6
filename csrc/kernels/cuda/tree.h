// Kernels whose blocks end in one result each.
//
// Such a kernel has Params and Partial, and
//   static Partial gather(const Params&, Place)          what a thread has
//   static Partial combine(Partial, Partial)
//   static void finish(const Params&, Place, Partial)    what the block has, on one thread
// Threads are combined in a fixed tree, so the order of additions is always the same.

#pragma once

#include "kernels/cuda/launch.h"

namespace pydist::cuda {

#if defined(__CUDACC__)

template <typename Kernel>
__global__ void __launch_bounds__(kBlockThreads)
    run_tree(const __grid_constant__ typename Kernel::Params params) {
  using Partial = typename Kernel::Partial;
  __shared__ Partial partials[kBlockThreads];
  const Place place = {blockIdx.x, gridDim.x, threadIdx.x};
  partials[place.thread] = Kernel::gather(params, place);
  for (unsigned half = kBlockThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (place.thread < half) {
      partials[place.thread] =
          Kernel::combine(partials[place.thread], partials[place.thread + half]);
    }
  }
  if (place.thread == 0) {
    Kernel::finish(params, place, partials[0]);
  }
}

template <typename Kernel>
int launch_tree(const typename Kernel::Params& params, std::uint64_t blocks, void* stream) {
  return start(reinterpret_cast<const void*>(run_tree<Kernel>), &params, blocks, stream);
}

template <typename Kernel>
int load_tree_kernel() {
  return load(reinterpret_cast<const void*>(run_tree<Kernel>));
}

#else

template <typename Kernel>
int launch_tree(const typename Kernel::Params& params, std::uint64_t blocks, void*) {
  for (std::uint64_t block = 0; block < blocks; ++block) {
    typename Kernel::Partial partials[kBlockThreads];
    for (unsigned thread = 0; thread < kBlockThreads; ++thread) {
      partials[thread] = Kernel::gather(params, {block, blocks, thread});
    }
    for (unsigned half = kBlockThreads / 2; half > 0; half /= 2) {
      for (unsigned thread = 0; thread < half; ++thread) {
        partials[thread] = Kernel::combine(partials[thread], partials[thread + half]);
      }
    }
    Kernel::finish(params, {block, blocks, 0}, partials[0]);
  }
  return 0;
}

template <typename Kernel>
int load_tree_kernel() {
  return 0;
}

#endif

}  // namespace pydist::cuda
