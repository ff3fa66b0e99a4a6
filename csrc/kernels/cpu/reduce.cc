#include "kernels/cpu/reduce.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "kernels/cpu/instruction_set.h"

namespace pydist {
namespace {

// Below this a streaming copy would spend its time in alignment and the fence.
constexpr std::size_t kStreamingCopyBytes = 16 * 1024;

void validate(const Reduction& reduction, std::span<const void* const> inputs,
              std::span<void* const> outputs) {
  if (!is_supported(reduction.op, reduction.dtype)) {
    throw InvalidUsage(join("reduce: ", to_string(reduction.op), " is not defined for ",
                            to_string(reduction.dtype), " elements"));
  }
  if (inputs.empty() || outputs.empty()) {
    throw InvalidUsage(join("reduce: needs at least one input and one output, got ", inputs.size(),
                            " and ", outputs.size()));
  }
  if (reduction.op == ReduceOp::kPremulSum && reduction.factors.size() != inputs.size()) {
    throw InvalidUsage(join("reduce: premul_sum needs one factor for each input, got ",
                            reduction.factors.size(), " factors for ", inputs.size(), " inputs"));
  }
}

// Streaming stores spare the read of a line that is going to be overwritten. In place the line has
// been read already, and writing around the cache only makes its copy there worthless.
bool is_in_place(std::span<const void* const> inputs, std::span<void* const> outputs) {
  return std::all_of(outputs.begin(), outputs.end(), [&](const void* output) {
    return std::find(inputs.begin(), inputs.end(), output) != inputs.end();
  });
}

}  // namespace

void reduce(const Reduction& reduction, std::span<const void* const> inputs,
            std::span<void* const> outputs, std::size_t count, StoreHint hint,
            std::optional<InstructionSet> set) {
  validate(reduction, inputs, outputs);
  if (count == 0) {
    return;
  }
  kernels::kernel_set(set).reduce(
      {.dtype = reduction.dtype,
       .op = reduction.op,
       .divisor = reduction.divisor,
       .factors = reduction.factors.data(),
       .inputs = inputs.data(),
       .input_count = inputs.size(),
       .outputs = outputs.data(),
       .output_count = outputs.size(),
       .count = count,
       .streaming = hint == StoreHint::kStreaming && !is_in_place(inputs, outputs)});
}

void copy_bytes(void* output, const void* input, std::size_t bytes, StoreHint hint) {
  if (hint == StoreHint::kStreaming && bytes >= kStreamingCopyBytes) {
    kernels::kernel_set().copy_streaming(output, input, bytes);
  } else if (bytes > 0) {
    std::memcpy(output, input, bytes);
  }
}

}  // namespace pydist
