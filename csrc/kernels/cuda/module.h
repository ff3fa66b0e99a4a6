// What the files of the kernel library offer each other.

#pragma once

namespace pydist::cuda {

// Put a file's kernels onto the current device; 0 or a cudaError_t.
int load_reduce_kernels();
int load_convert_kernels();
int load_optimizer_kernels();

}  // namespace pydist::cuda
