// Memory of the fake CUDA device, and pinned host memory. All of it lies on the host.
//
// Freed memory is overwritten with ones (NaN, as a floating-point number) and kept for a while, so
// that whoever still uses it gets wrong results. Device memory is freed in the order of the stream
// that it was allocated on, as by torch's caching allocator.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <memory>
#include <vector>

namespace fake_cuda {

[[nodiscard]] c10::DataPtr allocate_on_device(std::size_t bytes);

// The memory of `storage`, which is on the CPU, as memory of the current stream of a device.
[[nodiscard]] c10::DataPtr move_to_device(c10::Storage storage, c10::DeviceIndex device);

// Frees it no sooner than `stream` has done what it has been given by then.
void record_stream(const c10::DataPtr& data, const c10::Stream& stream);

// Keeps memory of the device's allocator as long as what it returns; nothing for any other.
[[nodiscard]] std::shared_ptr<void> keep(const c10::DataPtr& data);

// Whether it was allocated while the capture that is under way was.
[[nodiscard]] bool is_of_capture(const c10::DataPtr& data);

// Makes torch's cache keep so much of the fake driver's memory (tests/fakes), until it is emptied.
void keep_in_cache(long bytes);

// Whether the memory is in no use any more, and was not for long.
[[nodiscard]] bool is_freed(const void* data);

[[nodiscard]] bool is_pinned(const void* data);
// Bytes that the pinned allocator has handed out and not got back, and those pinned in place.
[[nodiscard]] std::size_t pinned_bytes();
[[nodiscard]] std::size_t registered_bytes();
// The devices that were current where somebody pinned in place, or ended that; and whether such
// calls are refused from now on.
[[nodiscard]] std::vector<int> registering_devices();
void refuse_to_register(bool refuses);
void refuse_to_pin(bool refuses);

// Registers the allocators with torch.
void install_allocators();

}  // namespace fake_cuda
