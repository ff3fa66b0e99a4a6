#include "c10d/device_streams.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <mutex>
#include <set>
#include <thread>

#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "c10d/memory_tensor.h"

namespace pydist {
namespace {

c10::impl::VirtualGuardImpl guard_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

// A function of the CUDA runtime that torch has loaded, if it has.
template <typename Function>
Function* find_in_runtime(const char* name) noexcept {
  if (void* const found = dlsym(RTLD_DEFAULT, name)) {
    return reinterpret_cast<Function*>(found);
  }
  constexpr std::array kRuntimes{"libcudart.so.13", "libcudart.so.12", "libcudart.so"};
  for (const char* const runtime : kRuntimes) {
    if (void* const library = dlopen(runtime, RTLD_LAZY | RTLD_NOLOAD)) {
      void* const found = dlsym(library, name);
      dlclose(library);  // torch holds it
      if (found != nullptr) {
        return reinterpret_cast<Function*>(found);
      }
    }
  }
  return nullptr;
}

}  // namespace

bool has_cuda() noexcept {
  // Not the device guard, which says 1 once torch has traced with tensors that hold no data.
  return at::detail::getCUDAHooks().deviceCount() > 0;
}

c10::Device torch_device(Device device) noexcept {
  return device.type == DeviceType::kCpu
             ? c10::Device(c10::DeviceType::CPU)
             : c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device.index));
}

Device device_of(c10::Device device) {
  if (device.is_cpu()) {
    return {};
  }
  if (!device.is_cuda()) {
    throw InvalidUsage(join("Expected a CPU or a CUDA device, got ", device.str(), "."));
  }
  const c10::DeviceIndex index =
      device.has_index() ? device.index() : guard_of(device).getDevice().index();
  return {DeviceType::kCuda, index};
}

c10::Stream current_stream(Device device) {
  const c10::Device of = torch_device(device);
  return guard_of(of).getStream(of);
}

c10::Stream high_priority_stream(Device device) {
  const c10::Device of = torch_device(device);
  return guard_of(of).getStreamFromGlobalPool(of, /*isHighPriority=*/true);
}

// By the driver: not every version of torch passes the question on.
bool is_capturing(const c10::Stream& stream) {
  if (!cuda::Driver::why_missing().empty()) {
    return false;
  }
  const cuda::DeviceGuard guard(stream.device_index());
  return cuda::Driver::get().is_capturing(stream.native_handle());
}

void DestroyEvent::operator()(c10::Event* event) const noexcept {
  try {
    const c10::DeviceGuard guard(event->device());
    delete event;
  } catch (const std::exception&) {
    // The device is gone, and the event with it.
  }
}

EventPtr record_event(const c10::Stream& stream) {
  const c10::DeviceGuard guard(stream.device());
  EventPtr event(new c10::Event(stream.device_type()));
  event->record(stream);
  return event;
}

void wait_on_device(const c10::Stream& stream, const c10::Event& event) {
  const c10::DeviceGuard guard(stream.device());
  event.block(stream);
}

void wait_on_device(const c10::Stream& stream, const c10::Stream& other) {
  if (stream != other) {
    wait_on_device(stream, *record_event(other));
  }
}

bool wait_on_host(const c10::Event& event, Deadline deadline,
                  const std::function<bool()>& gives_up) {
  // Most copies take less than a millisecond, so first the question is asked again and again.
  constexpr int kEagerTimes = 64;
  constexpr std::chrono::microseconds kLongestNap{200};
  const c10::DeviceGuard guard(event.device());
  std::chrono::microseconds nap{5};
  auto next_question = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
  for (int times = 0; !event.query(); ++times) {
    if (deadline.has_passed()) {
      return false;
    }
    if (const auto now = std::chrono::steady_clock::now(); now >= next_question) {
      if (gives_up && gives_up()) {
        return false;
      }
      next_question = now + std::chrono::milliseconds(1);
    }
    if (times < kEagerTimes) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(nap);
      nap = std::min(2 * nap, kLongestNap);
    }
  }
  return true;
}

void copy_async(void* target, Device target_device, const void* source, Device source_device,
                std::size_t bytes, const c10::Stream& stream) {
  if (bytes == 0) {
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::StreamGuard on_stream(stream);
  at::Tensor to = borrow_bytes(target, bytes, target_device);
  to.copy_(borrow_bytes(const_cast<void*>(source), bytes, source_device), /*non_blocking=*/true);
}

void prepare_copies(Device device) noexcept {
  static std::mutex mutex;
  static std::set<int> prepared;
  const std::lock_guard lock(mutex);
  if (!prepared.insert(device.index).second) {
    return;
  }
  try {
    constexpr std::size_t kBytes = 8;
    const OutsideCaptures outside;
    const c10::DataPtr on_host = allocate_pinned(kBytes);
    const c10::DataPtr on_device = allocate_on_device(kBytes, device);
    const c10::Stream stream = high_priority_stream(device);
    copy_async(on_device.get(), device, on_host.get(), Device{}, kBytes, stream);
    copy_async(on_host.get(), Device{}, on_device.get(), device, kBytes, stream);
    const EventPtr copied = record_event(stream);
    wait_on_device(high_priority_stream(device), *copied);
    static_cast<void>(wait_on_host(*copied, Deadline::in(std::chrono::seconds(10))));
  } catch (const std::exception& error) {
    // The first copy will say so.
    log_line(LogLevel::kInfo, join("copies between host and GPU: ", error.what()));
  }
}

cuda::Framework torch_as_framework() noexcept {
  cuda::Framework torch;
  torch.empty_cache = [] {
    try {
      auto* const allocator =
          dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(c10::DeviceType::CUDA));
      if (allocator != nullptr && allocator->initialized()) {
        allocator->emptyCache();
      }
    } catch (const std::exception& error) {
      log_line(LogLevel::kWarning, join("torch's cache of GPU memory: ", error.what()));
    }
  };
  torch.is_capturing = [](int device) {
    return pydist::is_capturing(current_stream({DeviceType::kCuda, device}));
  };
  return torch;
}

c10::DataPtr allocate_pinned(std::size_t bytes) {
  c10::Allocator* allocator = nullptr;
  try {
    allocator = at::getHostAllocator(c10::DeviceType::CUDA);
  } catch (const c10::Error&) {
    // Registered by torch with CUDA alone.
  }
  allocator = allocator != nullptr ? allocator : c10::GetCPUAllocator();
  return allocator->allocate(bytes);
}

c10::DataPtr allocate_on_device(std::size_t bytes, Device device) {
  c10::Allocator* const allocator = c10::GetAllocator(c10::DeviceType::CUDA);
  const c10::DeviceGuard guard(torch_device(device));
  return allocator->allocate(bytes);
}

PinnedRange::PinnedRange(void* data, std::size_t bytes, Device device) : device_(device) {
  using Register = int(void* data, std::size_t bytes, unsigned flags);
  using Forget = int();
  static Register* const pin = find_in_runtime<Register>("cudaHostRegister");
  static Forget* const forget_error = find_in_runtime<Forget>("cudaGetLastError");
  constexpr unsigned kPortable = 1;  // for all contexts of the process
  if (pin == nullptr || bytes == 0) {
    return;
  }
  const c10::DeviceGuard guard(torch_device(device));
  if (pin(data, bytes, kPortable) == 0) {
    data_ = data;
  } else if (forget_error != nullptr) {
    // torch would take it for the next kernel's.
    (void)forget_error();
  }
}

PinnedRange::~PinnedRange() {
  using Unregister = int(void* data);
  static Unregister* const unpin = find_in_runtime<Unregister>("cudaHostUnregister");
  if (data_ == nullptr || unpin == nullptr || in_forked_child()) {
    return;
  }
  try {
    const c10::DeviceGuard guard(torch_device(device_));
    (void)unpin(data_);
  } catch (const std::exception&) {
    // The device is gone, and so is the memory that was pinned for it.
  }
}

OutsideCaptures::OutsideCaptures() noexcept {
  if (cuda::Driver::why_missing().empty()) {
    relaxed_.emplace();
  }
}

}  // namespace pydist
