// Streams, events, copies and pinned memory of CUDA devices, without CUDA: through the interfaces
// that torch registers for whatever it calls CUDA. So one build serves torch with CUDA and without,
// and tests bring a device of their own (tests/fake_cuda).
//
// Note [Copies by torch]
// A copy is torch's own copy_ with non_blocking=True on borrowed memory, under a guard of the
// stream, rather than cudaMemcpyAsync. That needs no CUDA runtime to be found, linked or of the
// right version, is what torch itself does between devices, and shows in the profiler. It costs a
// few microseconds a copy, beside megabytes at the speed of the bus.
//
// Note [Events on any thread]
// torch's events go to their device to be recorded, waited for or destroyed, and then back to the
// device that is the thread's: by cudaSetDevice, which opens that device's context (some hundred MB
// of it; refused where it belongs to another process). Threads of ours have chosen no device, so
// theirs would be the first. Under a c10::DeviceGuard of the event's own there is nothing to go
// back to, and that guard itself returns to no device that has no context. So events are reached
// through what is declared here; where torch handles its own (futures do) on a thread of ours,
// there is a guard around it.
//
// Thread safe, but for one event used by several threads. Nothing here takes the GIL.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>

#include "base/buffer.h"
#include "base/deadline.h"
#include "cuda/device_memory.h"
#include "cuda/driver.h"

namespace pydist {

// Whether this torch has a CUDA device to offer. False at no cost on torch without CUDA.
[[nodiscard]] bool has_cuda() noexcept;

[[nodiscard]] c10::Device torch_device(Device device) noexcept;
// Of a CPU or CUDA device; the current one where a CUDA device has no index.
[[nodiscard]] Device device_of(c10::Device device);

// The stream on which the calling thread works. Its native_handle() is a cudaStream_t.
[[nodiscard]] c10::Stream current_stream(Device device);

// A stream of torch's pool, which serves those in it in turn and destroys none.
[[nodiscard]] c10::Stream high_priority_stream(Device device);

// Whether the stream records a CUDA graph. False where nobody can tell.
[[nodiscard]] bool is_capturing(const c10::Stream& stream);

// See Note [Events on any thread].
struct DestroyEvent {
  void operator()(c10::Event* event) const noexcept;
};
using EventPtr = std::unique_ptr<c10::Event, DestroyEvent>;

// Records everything that the stream has been given so far. Never null.
[[nodiscard]] EventPtr record_event(const c10::Stream& stream);

// What `stream` is given from now on comes after the event.
void wait_on_device(const c10::Stream& stream, const c10::Event& event);
// What `stream` is given from now on comes after all that `other` has been given so far.
void wait_on_device(const c10::Stream& stream, const c10::Stream& other);

// Waits for the event on the host. Returns false once the deadline has passed, or `gives_up()` says
// so; that is asked every millisecond or so.
[[nodiscard]] bool wait_on_host(const c10::Event& event, Deadline deadline,
                                const std::function<bool()>& gives_up = nullptr);

// Starts copying `bytes` between a device and the host, or within a device, on `stream`. The memory
// must stay until the copy is over. With ordinary host memory, the call may last as long as the
// copy.
void copy_async(void* target, Device target_device, const void* source, Device source_device,
                std::size_t bytes, const c10::Stream& stream);

// Makes what copies need first, once for each device: streams, pinned memory, the copies of a word.
// CUDA may let such first times wait for kernels that run, and those of NCCL may wait for a rank
// that waits for this one's message: so call it before there are any.
void prepare_copies(Device device) noexcept;

// What the engine asks of torch (cuda/device_memory.h).
[[nodiscard]] cuda::Framework torch_as_framework() noexcept;

// Host memory that devices copy to and from at full speed, from torch's cache of such memory;
// ordinary memory where torch has none.
[[nodiscard]] c10::DataPtr allocate_pinned(std::size_t bytes);

// Device memory from torch's caching allocator, bound to the calling thread's current stream as a
// tensor's memory is.
[[nodiscard]] c10::DataPtr allocate_on_device(std::size_t bytes, Device device);

// Pins memory that somebody else allocated, for as long as this object lives, in the context of
// `device`: a thread that has chosen no device would start the first one for it. Where the CUDA
// runtime can't be found, or refuses, the memory stays ordinary.
class PinnedRange {
 public:
  PinnedRange(void* data, std::size_t bytes, Device device);
  PinnedRange(const PinnedRange&) = delete;
  PinnedRange& operator=(const PinnedRange&) = delete;
  ~PinnedRange();

 private:
  const Device device_;
  void* data_ = nullptr;
};

// For threads of ours: until destroyed, what this one does (ask events, allocate) neither fails nor
// breaks a capture into a graph that is under way on another thread.
class OutsideCaptures {
 public:
  OutsideCaptures() noexcept;

 private:
  std::optional<cuda::RelaxedCapture> relaxed_;
};

}  // namespace pydist
