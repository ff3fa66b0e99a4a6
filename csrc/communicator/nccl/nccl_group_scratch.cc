// The memory on the device that an NCCL group needs for itself (see NcclGroup::scratch()), and what
// it has to mind: captures into graphs, and registered memory where NCCL waits on that.

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "communicator/nccl/freed_device_memory.h"
#include "communicator/nccl/late_ends.h"
#include "communicator/nccl/nccl_group.h"
#include "communicator/nccl/streams_of_process.h"
#include "communicator/open_communicators.h"
#include "cuda/device_memory.h"
#include "cuda/driver.h"

namespace pydist {

// The scratch memory of a graph, which goes with it.
struct NcclGroup::GraphScratch {
  std::weak_ptr<NcclGroup> group;
  int device;
  std::uint64_t capture;
  std::byte* memory;

  void free() const {
    if (const auto owner = group.lock()) {
      const std::lock_guard lock(owner->mutex_);
      owner->graph_scratch_.erase(capture);
    }
    const cuda::DeviceGuard guard(device);
    const cuda::RelaxedCapture relaxed;
    cuda::Driver::get().free(memory);
  }

  // As a graph calls it, on a thread that may not call CUDA.
  static void let_go(void* argument) noexcept {
    log_errors_of([&] {
      const std::shared_ptr<GraphScratch> self(static_cast<GraphScratch*>(argument));
      if (is_process_ending() || in_forked_child()) {
        return;
      }
      const auto run = [self] { log_errors_of([&] { self->free(); }); };
      try {
        LateEnds::of_process().start("pydist-nccl-mem", run, Deadline::in(kFreePatience), "");
      } catch (const std::exception&) {  // no thread to be had
        FreedDeviceMemory::of_process().free_later(self->device, [self] {
          self->free();
          return true;
        });
      }
    });
  }
};

std::byte* NcclGroup::scratch() {
  if (capture_) {
    return scratch_of_graph();
  }
  return scratch_;
}

void NcclGroup::allocate_scratch() {
  free_now();
  const cuda::DeviceGuard guard(device_);
  const cuda::RelaxedCapture relaxed;
  scratch_ = static_cast<std::byte*>(cuda::allocate_memory(device_, kScratchBytes));
}

std::byte* NcclGroup::scratch_of_graph() {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = graph_scratch_.find(capture_->id); found != graph_scratch_.end()) {
      return found->second;
    }
  }
  const cuda::RelaxedCapture relaxed;
  const cuda::Driver& driver = cuda::Driver::get();
  auto* const memory = static_cast<std::byte*>(cuda::allocate_memory(device_, kScratchBytes));
  {
    const std::lock_guard lock(mutex_);
    graph_scratch_.emplace(capture_->id, memory);
  }
  // Kept if the graph does not take it, which fails the group.
  driver.when_gone(capture_->graph, &GraphScratch::let_go,
                   new GraphScratch{weak_from_this(), device_, capture_->id, memory});
  return memory;
}

// Once nothing is launched any more.
void NcclGroup::free_scratch() noexcept {
  if (scratch_ != nullptr && !is_launching_) {
    FreedDeviceMemory::of_process().free_later(device_,
                                               [memory = std::exchange(scratch_, nullptr)] {
                                                 cuda::Driver::get().free(memory);
                                                 return true;
                                               });
  }
}

void NcclGroup::free_now() {
  FreedDeviceMemory& freed = FreedDeviceMemory::of_process();
  if (freed.is_empty(device_) || (failure_.is_set() && !has_ended()) || is_any_captured() ||
      cuda::is_thread_capturing(device_)) {
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

// What a launch is captured into, if anything.
void NcclGroup::find_capture(const Launch& launch) {
  const cuda::DeviceGuard guard(device_);
  const cuda::Driver& driver = cuda::Driver::get();
  capture_.reset();
  for (nccl::StreamHandle each : launch.streams) {
    if (!capture_) {
      capture_ = driver.capture_of(each);
    }
  }
  const std::optional<cuda::Capture> own = driver.capture_of(stream());
  if (own && (!capture_ || capture_->id != own->id)) {
    throw InvalidUsage(pydist::join(
        to_string(launch.kind), " on the group '", control_->name(),
        "', whose operations another stream captures into a CUDA graph: call it before or after "
        "the capture, or on a group of its own (torch.distributed.new_group())."));
  }
}

bool NcclGroup::is_any_captured() { return StreamsOfProcess::of_process().are_captured(); }

}  // namespace pydist
