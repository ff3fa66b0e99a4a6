// pydist's CUDA kernels without a GPU: what they would do, done by the CPU kernels on a stream of the
// fake CUDA driver.

#include "kernels/cuda_kernels.h"

#include <functional>
#include <memory>
#include <vector>

#include "cuda_driver.h"
#include "kernels/convert_cpu.h"
#include "kernels/reduce_cpu.h"

