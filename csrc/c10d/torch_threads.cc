#include "c10d/torch_threads.h"

#include <ATen/TensorIterator.h>
#include <ATen/ops/from_blob.h>

namespace pydist {

// at::parallel_for is a template over OpenMP: compiled here it would need the very OpenMP that
// torch was linked with, or else run on one thread, or on threads of another library's. torch's
// iterator has it compiled in. So it walks a tensor of `count` bytes that nobody touches, and the
// addresses are the numbers.
void on_torch_threads(std::int64_t count, std::int64_t grain,
                      const std::function<void(std::int64_t first, std::int64_t last)>& run) {
  if (count <= grain) {
    run(0, count);
    return;
  }
  static char base;
  at::TensorIterator iterator = at::TensorIteratorConfig()
                                    .set_check_mem_overlap(false)
                                    .resize_outputs(false)
                                    .check_all_same_dtype(false)
                                    .add_owned_output(at::from_blob(&base, {count}, at::kByte))
                                    .build();
  iterator.for_each(
      [&](char** data, const std::int64_t* strides, std::int64_t length, std::int64_t rows) {
        for (std::int64_t row = 0; row < rows; ++row) {
          const std::int64_t first = data[0] + row * strides[1] - &base;
          run(first, first + length);
        }
      },
      grain);
}

}  // namespace pydist
