// What torch asks CUDA for beside kernels, streams and memory: whether it is there at all.

#pragma once

namespace fake_cuda {

// Once the devices are there.
void install_hooks();

}  // namespace fake_cuda
