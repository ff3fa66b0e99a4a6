// What the CUDA kernels accept, checked on the host before anything is launched.
//
// Compiled into the engine, which makes an InvalidUsage of the answer, and into the kernel library,
// which refuses the launch. Needs neither CUDA nor a device. Thread safe.

#pragma once

#include <string>

#include "kernels/cuda/kernels.h"

namespace pydist {

// What is wrong with a descriptor, in a sentence; empty where nothing is. Looks at pointers only
// for being null or misaligned, never through one that belongs to the device.
[[nodiscard]] std::string fault_in(const PydistCudaReduce& reduce);
[[nodiscard]] std::string fault_in(const PydistCudaConvert& convert);
[[nodiscard]] std::string fault_in(const PydistCudaAdam& adam);
[[nodiscard]] std::string fault_in(const PydistCudaSgd& sgd);

}  // namespace pydist
