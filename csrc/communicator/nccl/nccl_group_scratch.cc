// The memory on the device that an NCCL group needs for itself (see NcclGroup::scratch()), and what
// it has to mind: captures into graphs, and registered memory where NCCL waits on that.

#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "communicator/nccl/freed_device_memory.h"
#include "communicator/nccl/nccl_group.h"
#include "communicator/nccl/streams_of_process.h"
#include "cuda/device_memory.h"
#include "cuda/driver.h"

namespace pydist {

std::byte* NcclGroup::scratch() {
  if (!capture_) {
    return scratch_;
  }
  std::byte*& of_graph = graph_scratch_[*capture_];
  if (of_graph == nullptr) {
    const cuda::RelaxedCapture relaxed;
    of_graph = static_cast<std::byte*>(cuda::allocate_memory(device_, kScratchBytes));
  }
  return of_graph;
}

void NcclGroup::allocate_scratch() {
  free_now();
  const cuda::DeviceGuard guard(device_);
  const cuda::RelaxedCapture relaxed;
  scratch_ = static_cast<std::byte*>(cuda::allocate_memory(device_, kScratchBytes));
}

// Once nothing is launched any more.
void NcclGroup::free_scratch() noexcept {
  if (is_launching_) {
    return;
  }
  const auto free_later = [this](std::byte* memory) {
    if (memory != nullptr) {
      FreedDeviceMemory::of_process().free_later(device_, [memory] {
        cuda::Driver::get().free(memory);
        return true;
      });
    }
  };
  free_later(std::exchange(scratch_, nullptr));
  for (const auto& [capture, memory] : std::exchange(graph_scratch_, {})) {
    free_later(memory);
  }
}

void NcclGroup::free_now() {
  FreedDeviceMemory& freed = FreedDeviceMemory::of_process();
  if (freed.is_empty(device_) || (failure_.is_set() && !has_ended())) {
    return;
  }
  drain(Deadline::in(end_patience_));
  static_cast<void>(freed.free_now(device_));
}

// Where GPUs share an NVSwitch, NCCL reduces by multicast (NVLS). On registered memory each launch
// of such a reduction is a barrier of the host's ranks, on the host, and an abort does not end that
// barrier (nvlsRegisterBuffer, as of NCCL 2.30). A launch must wait for no rank: each rank launches
// its operations in one order for each model, while others may wait for another group's collective.
bool NcclGroup::waits_on_registered_memory() const {
  const char* const chosen = std::getenv("NCCL_NVLS_ENABLE");
  const bool is_off = chosen != nullptr && std::string_view(chosen) == "0";
  return !is_off && cuda::Driver::get().has_multicast(device_);
}

// What a launch is captured into, if anything. One capture at a time holds operations of pydist's.
void NcclGroup::find_capture(const Launch& launch) {
  const cuda::DeviceGuard guard(device_);
  const cuda::Driver& driver = cuda::Driver::get();
  capture_.reset();
  for (nccl::StreamHandle each : launch.streams) {
    if (!capture_) {
      capture_ = driver.capture_of(each);
    }
  }
  const std::optional<std::uint64_t> own = driver.capture_of(stream());
  if (own && capture_ != own) {
    throw InvalidUsage(pydist::join(
        to_string(launch.kind), " on the group '", control_->name(),
        "', whose operations another stream captures into a CUDA graph: call it before or after "
        "the capture, or on a group of its own (torch.distributed.new_group())."));
  }
  if (capture_ && !own) {
    const std::optional<std::uint64_t> other = StreamsOfProcess::of_process().capture();
    if (other && other != capture_) {
      throw InvalidUsage(pydist::join(
          to_string(launch.kind), " on the group '", control_->name(),
          "' in a capture into a CUDA graph, while another capture with operations of pydist's is "
          "under way: capture one graph after the other."));
    }
  }
}

}  // namespace pydist
