#include "cuda/device_memory.h"

#include <atomic>

#include "base/error.h"
#include "cuda/driver.h"

namespace pydist::cuda {
namespace {

std::atomic<decltype(Framework::empty_cache)> empty_cache{nullptr};
std::atomic<decltype(Framework::is_capturing)> is_capturing{nullptr};

}  // namespace

void set_framework(const Framework& framework) noexcept {
  empty_cache = framework.empty_cache;
  is_capturing = framework.is_capturing;
}

bool is_thread_capturing(int device) {
  const auto asked = is_capturing.load();
  return asked != nullptr && asked(device);
}

void* allocate_memory(int device, std::size_t bytes, const std::function<void*()>& allocate) {
  void* data = allocate();
  const char* tried = "";
  if (const auto empty = empty_cache.load(); data == nullptr && empty != nullptr) {
    if (is_thread_capturing(device)) {
      tried = " (torch's cache cannot be emptied during a capture into a CUDA graph)";
    } else {
      empty();
      data = allocate();
      tried = ", after torch's cache was emptied";
    }
  }
  if (data == nullptr) {
    const Room room = Driver::get().room();
    throw TransportError(join("cuda:", device, " has no room for ", bytes,
                              " bytes of pydist's: ", room.free_bytes, " of its ", room.total_bytes,
                              " bytes are free", tried,
                              ". Make the model or its batches smaller, or end what else uses this "
                              "GPU (nvidia-smi lists it)."));
  }
  return data;
}

void* allocate_memory(int device, std::size_t bytes) {
  return allocate_memory(device, bytes, [bytes] { return Driver::get().try_allocate(bytes); });
}

}  // namespace pydist::cuda
