// Stands for a CUDA kernel library of another version, or for an incomplete one.

#include <cstdlib>

#include "kernels/cuda/kernels.h"

int pydist_cuda_abi_version() {
  const char* const claimed = std::getenv("PYDIST_TEST_FAKE_CUDA_ABI");
  return claimed != nullptr ? std::atoi(claimed) : 0;
}
