// Device tensors on a backend of host memory: several ranks on one GPU, machines without NCCL.
//
// Wraps a communicator. Operations on host memory go straight through; those on device memory are
// cut into parts (communicator/staging_parts.h) that pass through pinned host memory.
//
// Note [Three slots]
// Collectives that can be cut use three slots, in turn: while one part is with the host's
// communicator, the next one is copied from the device and the one before to it, each direction on
// a stream of its own. Where the backend has symmetric memory the slots are in it, pinned, so that
// the host copies nothing. All ranks allocate them together, in the first such collective.
// Everything else takes pinned memory of its own size from torch's cache.
//
// Note [Streams]
// What the stream that is current at submit() was given before comes before the operation: the
// copies wait for it, on the device. The operation has finished once its results lie in device
// memory, so whoever has seen it finish may use them on any stream, and reuse or free its memory:
// nothing is left that would need record_stream().
//
// Note [Order]
// Collectives of a group are in one order, whatever they work on. While one on the device is under
// way, those on host memory wait behind it, on the thread that carries all of them; otherwise they
// go straight through. Messages need no such thread but to wait for copies, never for a peer.
//
// A collective of one rank alone stays on the device, on the stream that is current at submit().
//
// A tensor may be on the device on one rank and on the host on another only if it is small enough
// to be one part on the device.

#pragma once

#include "communicator/communicator.h"

namespace pydist {

// `host` with device memory added; `host` itself where this torch has no CUDA device.
[[nodiscard]] CommunicatorPtr with_staging(CommunicatorPtr host);

}  // namespace pydist
