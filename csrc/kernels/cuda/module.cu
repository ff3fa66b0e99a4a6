// The library itself: its interface version, its targets, errors, devices.

#include "kernels/cuda/module.h"

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"

int pydist_cuda_abi_version() { return PYDIST_CUDA_ABI_VERSION; }

const char* pydist_cuda_targets() { return PYDIST_CUDA_TARGETS; }

#if defined(__CUDACC__)

const char* pydist_cuda_error_text(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

int pydist_cuda_device_count(int* count) {
  // Without a driver the runtime leaves its argument as it was.
  *count = 0;
  return pydist::cuda::cleared(cudaGetDeviceCount(count));
}

#else

const char* pydist_cuda_error_text(int error) { return error == 0 ? "no error" : "an error"; }

int pydist_cuda_device_count(int* count) {
  *count = 1;
  return 0;
}

#endif

int pydist_cuda_load_kernels() {
  using namespace pydist::cuda;
  for (int (*const load)() : {load_reduce_kernels, load_convert_kernels, load_optimizer_kernels}) {
    if (const int error = load(); error != 0) {
      return error;
    }
  }
  return 0;
}
