#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <algorithm>
#include <new>
#include <vector>

#include "hooks.h"
#include "memory.h"
#include "streams.h"

namespace at {
namespace {

class Hooks final : public CUDAHooksInterface {
 public:
  void init() const override {}
  bool hasCUDA() const override { return fake_cuda::device_count() > 0; }
  bool hasCUDART() const override { return hasCUDA(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return hasCUDA(); }
  bool hasPrimaryContext(DeviceIndex device) const override {
    const std::vector<int> open = fake_cuda::contexts();
    return std::find(open.begin(), open.end(), device) != open.end();
  }
  int getNumGPUs() const override { return fake_cuda::device_count(); }
  DeviceIndex deviceCount() const override {
    return static_cast<DeviceIndex>(fake_cuda::device_count());
  }
  DeviceIndex current_device() const override { return fake_cuda::current_device(); }
  DeviceIndex getCurrentDevice() const override { return fake_cuda::current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { fake_cuda::set_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return fake_cuda::exchange_device(device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? fake_cuda::current_device() : fake_cuda::maybe_exchange_device(device);
  }
  bool isPinnedPtr(const void* data) const override { return fake_cuda::is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override {
    return getHostAllocator(DeviceType::CUDA);
  }
  Allocator* getCUDADeviceAllocator() const override { return GetAllocator(DeviceType::CUDA); }
  const Generator& getDefaultGenerator(DeviceIndex /*device*/) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  Generator getNewGenerator(DeviceIndex /*device*/) const override {
    return at::detail::createCPUGenerator();
  }
  void deviceSynchronize(DeviceIndex /*device*/) const override { fake_cuda::synchronize(); }
};

}  // namespace
}  // namespace at

// torch has looked for hooks while it was imported, and has found none; it keeps an object of the
// base class, which says so. That is where ours go: both are a pointer to their functions.
void fake_cuda::install_hooks() {
  static_assert(sizeof(at::Hooks) == sizeof(at::CUDAHooksInterface));
  auto& kept = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  new (&kept) at::Hooks;
}
