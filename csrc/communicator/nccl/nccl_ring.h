// Ring all-reduce, reduce-scatter and all-gather over NCCL's point-to-point messages, with our own
// kernels between the steps.
//
// Steps, traffic and order of the sums are those of collectives/ring_schedule.h. float16 and
// bfloat16 travel as float32 while they are summed, and are rounded once; so an all-reduce of them
// sends 3(p-1)/p of the buffer where one of float32 sends 2(p-1)/p. With a wire type partial sums
// are rounded to it at every hop, and results travel in it. Buffers are done in pieces that fit
// into the group's scratch memory.

#pragma once

#include <cstddef>

#include "collectives/call.h"
#include "communicator/nccl/nccl_group.h"
#include "kernels/cuda/library.h"

namespace pydist {

// The type that sums are in on their way: the wire's, float32 for 16-bit types, else their own.
[[nodiscard]] DType summing_type(const Call& call) noexcept;

// NCCL's messages, as bytes; empty ones are none.
void send_on_nccl(NcclGroup& group, const void* data, std::size_t bytes, int to);
void receive_on_nccl(NcclGroup& group, void* data, std::size_t bytes, int from);

// all_reduce, reduce_scatter or reduce.
void reduce_on_ring(NcclGroup& group, const CudaLibrary& kernels, const Call& call);

void all_gather_on_ring(NcclGroup& group, const Call& call);

}  // namespace pydist
