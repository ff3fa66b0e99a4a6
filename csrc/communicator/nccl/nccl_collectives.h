// The collectives on NCCL: what each puts on the stream of its group.
//
// clang-format off
//   way          when                                                  elements are combined
//   direct       NCCL has the operator and the type                    by NCCL, in the type itself
//   converted    a factor, a wire type, or a mean of float16           by NCCL, in scratch memory: in the wire
//                                                                      type, otherwise 16-bit types in float32,
//                                                                      others in their own. Without kernels, a
//                                                                      factor and such a mean go directly
//   ring         NCCL lacks the operator or the type (int16, bitwise   by our kernels, see nccl_ring.h
//                operators, min and max of floating point, whose NaN
//                NCCL loses), or PYDIST_ALGORITHM=ring
// clang-format on
//
// A mean divides once, after the sum, in float32 or the type's own precision if that is wider. The
// choice depends on what all ranks must agree on, never on a rank's own buffers; but for large
// blocks, see needs_one_form().

#pragma once

#include <string>

#include "communicator/nccl/nccl_group.h"
#include "communicator/operation.h"
#include "kernels/cuda/library.h"

namespace pydist {

struct NcclSettings {
  // Our kernels, loaded; null where a rank of the group cannot use them, and then some operations
  // are not supported.
  const CudaLibrary* kernels = nullptr;
  // The reason, for people.
  std::string why_no_kernels;
  bool pins_ring = false;

  [[nodiscard]] bool has_kernels() const noexcept { return kernels != nullptr; }
};

// In which order, and in what precision, elements are combined; for people.
[[nodiscard]] const char* numerics_on_nccl(const NcclSettings& settings) noexcept;

// Why the operation cannot be run; empty where it can.
[[nodiscard]] std::string why_not_on_nccl(const NcclSettings& settings, OpKind kind, ReduceOp op,
                                          DType dtype, bool has_wire_dtype);

// Whether all ranks have to give the blocks in one form: one tensor, or a list of tensors. NCCL has
// a call of its own for one tensor. Lists take it too, by way of the scratch memory, as far as that
// goes; larger ones are one call for each block, which does not go together with the other.
[[nodiscard]] bool needs_one_form(const NcclSettings& settings, const Operation& operation,
                                  int size);

// Puts a collective, validated and supported, on the group's stream.
void enqueue_on_nccl(NcclGroup& group, const NcclSettings& settings, const Operation& operation);

}  // namespace pydist
