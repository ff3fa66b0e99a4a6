// The NCCL backend: collectives of GPU tensors on NCCL, everything else on a host backend beside
// it.
//
// The host backend (native in one host, otherwise gloo) carries CPU tensors, so one group serves
// both devices; messages (send, recv) of GPU tensors, whose matching by peer and tag NCCL does not
// have; and the news of failures, see communicator/nccl/nccl_group.h.

#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "base/env.h"
#include "communicator/communicator.h"
#include "communicator/nccl/nccl_api.h"
#include "health/long_wait.h"
#include "kernels/cuda/library.h"

namespace pydist {

class Endpoint;
class NcclGroup;
class NcclWatchdog;

struct NcclOptions {
  // Null where this rank has no NCCL that will do, which all ranks are then told.
  nccl::ApiPtr api;
  std::string why_no_api;
  // The group that this one extends, with its ranks, name and timeout.
  CommunicatorPtr host;
  // A group of the same ranks in the same order, whose communicator is split; may be null.
  std::shared_ptr<NcclGroup> parent = nullptr;
  // This rank's, as the process counts them.
  int device = 0;
  const CudaLibrary* kernels = &CudaLibrary::get();
  // Why the group does without the CUDA kernels; where the caller gives a reason, the group does
  // not look for them.
  std::string why_no_kernels;
  Environment environment = Environment::read();
  // As in native_communicator.h: what the process shows to its peers; null for the process's own.
  std::shared_ptr<Endpoint> endpoint = nullptr;
  // How long NCCL may take to abort, or to end, before it is left to itself.
  std::chrono::milliseconds end_patience{10'000};
  // How long an error of NCCL's that a peer may be the reason for waits for its name.
  std::chrono::milliseconds name_patience{3'000};
  // How long an operation may last before the log tells of it.
  std::chrono::milliseconds long_wait = kLongWait;
};

// Collective over the ranks of `host`, which then belongs to the new group. Succeeds on every rank,
// or throws the same error on every rank: TransportError where NCCL cannot serve them, Timeout,
// PeerLost.
[[nodiscard]] CommunicatorPtr create_nccl_communicator(NcclOptions options);

// For a process that leaves its job: waits until NCCL has ended the communicators of ended groups
// (late_ends.h), then for the GPU, and frees the memory of those groups (freed_device_memory.h).
void let_go_of_nccl() noexcept;

}  // namespace pydist
