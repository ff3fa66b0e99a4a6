// One collective or point-to-point operation, as a backend receives it. A value: its buffers are
// somebody else's.
//
// Vocabulary. A *buffer* is a dense run of elements. A *block* is the part of a collective that
// belongs to one rank: all_gather yields one block of every rank. Blocks are given either as one
// buffer that holds all of them, equally sized, in rank order, or as one buffer for each rank.
//
// clang-format off
//   kind             inputs                       outputs
//   kAllReduce       1                            1 of the same count (may be the input)
//   kReduceScatter   1 of p blocks, or p          1: this rank's block
//   kAllGather       1: this rank's block         1 of p blocks, or p (ragged allowed)
//   kBroadcast       1 at the root                1 (at the root: the input, or none)
//   kReduce          1                            1 at the root, none elsewhere
//   kGather          1                            at the root: 1 of p blocks, or p (ragged); else none
//   kScatter         at the root: 1 of p, or p    1
//   kAllToAll        1 of p blocks, or p (ragged) 1 of p blocks, or p (ragged)
//   kSend            1                            none
//   kRecv            none                         1
//   kBarrier         none                         none
// clang-format on
//
// An output may be the very same memory as the input it stands for (in place: all_gather into the
// place of one's own block included); any other overlap is the caller's mistake.

#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "base/buffer.h"
#include "base/deadline.h"
#include "base/dtype.h"
#include "base/op_kind.h"
#include "base/reduce_op.h"
#include "communicator/buffer_owner.h"

namespace pydist {

// The peer of a receive that takes a message from anybody.
inline constexpr int kAnySource = -1;

struct Operation {
  OpKind kind = OpKind::kBarrier;
  Buffers inputs{};
  Buffers outputs{};
  ReduceOp op = ReduceOp::kSum;
  // The root of a rooted collective, the destination of a send, the source of a receive.
  int peer = 0;
  std::uint64_t tag = 0;
  // kPremulSum: this rank's factor.
  double factor = 1.0;
  // kPremulSum of floating point on a device, where Capabilities::takes_device_factors: further
  // numbers on that device. They are read when the operation runs: after what `stream` has been
  // given, and after the group's operations before this one. The caller keeps them as it keeps
  // buffers.
  DeviceFactor device_factor{};
  // The type in which the elements travel between ranks, where it differs from the buffers' own:
  // see kWireDTypes. Every rank gives the same.
  std::optional<DType> wire_dtype{};
  // The stream that produces the inputs and consumes the outputs (CUDA; null on the CPU).
  void* stream = nullptr;
  // Without one, the communicator's timeout counts from the submission.
  std::optional<Deadline> deadline{};
  // What keeps the memory of buffers on a device, for a backend that cannot end what it runs there:
  // that of a failed operation is kept until the device is done with it. Null where the buffers are
  // on the CPU, or are kept by the caller whatever happens.
  BufferOwnerPtr owner{};
  // What the journal calls this operation beside its kind: "bucket 7, first parameter fc.weight".
  std::string label{};

  // Tells the dtype and the device of all; null where there is none.
  [[nodiscard]] const Buffer* first_buffer() const noexcept {
    const Buffers& buffers = inputs.empty() ? outputs : inputs;
    return buffers.empty() ? nullptr : buffers.data();
  }
};

// The types in which sums, means and premul_sums of float32 can travel: half the bytes, at the
// price of their precision. Every rank's contribution, one's own too, is rounded to the type once,
// combined in float32, rounded again, and delivered as float32: what the reduction of buffers of
// that type gives. In a world of one as well, so that results are of one kind for every size.
inline constexpr std::array kWireDTypes{DType::kFloat16, DType::kBFloat16};

// Throws InvalidUsage where the operation is malformed by itself, whatever the other ranks do:
// counts, dtypes, roots, peers, an op that its dtype does not have, a wire type that makes no
// sense.
void validate(const Operation& operation, int rank, int size);

}  // namespace pydist
