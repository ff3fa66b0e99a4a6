#include "kernels/cpu/convert.h"

#include "base/error.h"
#include "kernels/cpu/instruction_set.h"

namespace pydist {
void widen_to_float32(DType from, const void* input, float* output, std::size_t count) {
  PYDIST_CHECK(is_16_bit_float(from));
  kernels::kernel_set().widen(from, input, output, count);
}

void narrow_from_float32(DType to, const float* input, void* output, std::size_t count) {
  PYDIST_CHECK(is_16_bit_float(to));
  kernels::kernel_set().narrow(to, input, output, count);
}

}  // namespace pydist
