// Device memory beside the allocator of the framework (torch), which keeps for itself what it does
// not use: where the device has no room, the framework is asked once to give that back.
//
// Free of torch; what has to be asked of it is given by the layer above. Thread safe.

#pragma once

#include <cstddef>
#include <functional>

namespace pydist::cuda {

// What the layer that knows the framework can do; null where it cannot.
struct Framework {
  // Gives back what the allocator keeps and does not use. Does not throw.
  void (*empty_cache)() = nullptr;
  // Whether the calling thread works on a stream of the device that is captured into a graph.
  bool (*is_capturing)(int device) = nullptr;
};

void set_framework(const Framework& framework) noexcept;

// False without a framework.
[[nodiscard]] bool is_thread_capturing(int device);

// What `allocate` returns; it returns null where the device, the current one, has no room, and is
// then called again. Throws TransportError with the sizes if there is still none. The framework is
// not asked on a thread that captures.
[[nodiscard]] void* allocate_memory(int device, std::size_t bytes,
                                    const std::function<void*()>& allocate);
// The driver's memory.
[[nodiscard]] void* allocate_memory(int device, std::size_t bytes);

}  // namespace pydist::cuda
