// Reductions: the mixtures of float32 and 16-bit types, and how a call becomes launches.

#include <cstdint>

#include "kernels/cuda/arguments.h"
#include "kernels/cuda/module.h"
#include "kernels/cuda/reduce_kernels.h"

namespace pydist::cuda {

namespace {

FoundKernel find_uniform_kernel(ReduceOp op, DType dtype) {
  return is_integral(dtype) ? find_integer_kernel(op, dtype) : find_float_kernel(op, dtype);
}

bool is_uniform(const PydistCudaReduce& reduce) {
  if (reduce.wire_dtype != DType::kFloat32 && reduce.output_dtype == DType::kFloat32) {
    return false;
  }
  for (std::uint32_t i = 0; i < reduce.input_count; ++i) {
    if (reduce.input_dtypes[i] != reduce.output_dtype) {
      return false;
    }
  }
  return true;
}

// Whether `elements` elements into the buffer a unit of `unit_elements` of them is aligned to
// itself.
bool is_aligned(const void* buffer, std::uint64_t elements, unsigned element_bytes,
                unsigned unit_elements) {
  const auto address = reinterpret_cast<std::uintptr_t>(buffer) + elements * element_bytes;
  return address % (element_bytes * unit_elements) == 0;
}

// Fills in where units begin and end; `bytes(i)` are those of an element of input i, `output_bytes`
// those of the output.
template <typename Bytes>
void lay_out(ReduceParams& params, std::uint64_t count, unsigned unit_elements, Bytes bytes,
             unsigned output_bytes) {
  std::uint64_t head = 0;
  for (; head < unit_elements; ++head) {
    bool aligned = is_aligned(params.output, head, output_bytes, unit_elements);
    for (std::uint32_t i = 0; aligned && i < params.input_count; ++i) {
      aligned = is_aligned(params.inputs[i], head, bytes(i), unit_elements);
    }
    if (aligned) {
      break;
    }
  }
  if (head == unit_elements || head > count) {
    head = count;
  }
  const std::uint64_t units = (count - head) / unit_elements;
  const std::uint64_t tail = head + units * unit_elements;
  params.edges[0] = {0, head, 0};
  params.aligned = {head, units, 0};
  params.edges[1] = {tail, count - tail, 0};
}

Combination combination_of(ReduceOp op, DType dtype) {
  switch (op) {
    case ReduceOp::kSum:
      return dtype == DType::kBool ? Combination::kOr : Combination::kSum;
    case ReduceOp::kMean:
    case ReduceOp::kPremulSum:
      return Combination::kSum;
    case ReduceOp::kProd:
      return dtype == DType::kBool ? Combination::kAnd : Combination::kProduct;
    case ReduceOp::kMin:
      return dtype == DType::kBool ? Combination::kAnd : Combination::kMinimum;
    case ReduceOp::kMax:
      return dtype == DType::kBool ? Combination::kOr : Combination::kMaximum;
    case ReduceOp::kBand:
      return Combination::kAnd;
    case ReduceOp::kBor:
      return Combination::kOr;
    case ReduceOp::kBxor:
      return Combination::kXor;
  }
  return Combination::kSum;
}

bool is_signed(DType dtype) { return dtype >= DType::kInt8 && dtype <= DType::kInt64; }

int launch_reduce(const PydistCudaReduce& reduce, void* stream) {
  ReduceParams params = {};
  for (std::uint32_t i = 0; i < reduce.input_count; ++i) {
    params.inputs[i] = reduce.inputs[i];
    params.dtypes[i] = reduce.input_dtypes[i];
    params.factors[i] = reduce.op == ReduceOp::kPremulSum ? reduce.factors[i] : 1.0;
    params.factors_32[i] = static_cast<float>(params.factors[i]);
  }
  params.output = reduce.output;
  params.input_count = reduce.input_count;
  params.combination = combination_of(reduce.op, reduce.output_dtype);
  params.is_signed = is_signed(reduce.output_dtype);
  params.weighs = reduce.op == ReduceOp::kPremulSum;
  params.divides = reduce.op == ReduceOp::kMean;
  params.divisor = reduce.divisor;
  params.divisor_32 = static_cast<float>(reduce.divisor);
  params.output_dtype = reduce.output_dtype;
  params.wire_dtype = reduce.wire_dtype;

  if (is_uniform(reduce)) {
    const FoundKernel found = find_uniform_kernel(reduce.op, reduce.output_dtype);
    if (found.kernel == nullptr) {
      return kInvalidValue;
    }
    const unsigned bytes = found.element_bytes;
    lay_out(
        params, reduce.count * element_size(reduce.output_dtype) / bytes, 16 / bytes,
        [&](std::uint32_t) { return bytes; }, bytes);
    return found.kernel->launch(params, stream);
  }
  lay_out(
      params, reduce.count, Mixed::Unit<true>::kElements,
      [&](std::uint32_t i) { return static_cast<unsigned>(element_size(params.dtypes[i])); },
      static_cast<unsigned>(element_size(reduce.output_dtype)));
  return kReduceKernel<Mixed>.launch(params, stream);
}

}  // namespace

int load_reduce_kernels() {
  for (int op_index = 0; op_index < kReduceOpCount; ++op_index) {
    const auto op = static_cast<ReduceOp>(op_index);
    for (int dtype_index = 0; dtype_index < kDTypeCount; ++dtype_index) {
      const FoundKernel found = find_uniform_kernel(op, static_cast<DType>(dtype_index));
      if (found.kernel != nullptr) {
        if (const int error = found.kernel->load(); error != 0) {
          return error;
        }
      }
    }
  }
  return kReduceKernel<Mixed>.load();
}

}  // namespace pydist::cuda

int pydist_cuda_reduce(const PydistCudaReduce* reduce, void* stream) {
  using namespace pydist;
  if (reduce == nullptr || !fault_in(*reduce).empty()) {
    return cuda::kInvalidValue;
  }
  if (reduce->count == 0) {
    return 0;
  }
  return cuda::launch_reduce(*reduce, stream);
}
