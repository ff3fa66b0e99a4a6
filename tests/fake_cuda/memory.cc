#include "memory.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <utility>
#include <vector>

#include "fake_cuda.h"
#include "streams.h"

namespace fake_cuda {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kQuarantineBytes = std::size_t{32} << 20;

void* allocate(std::size_t bytes) {
  void* const data = std::aligned_alloc(
      kAlignment, std::max(bytes + kAlignment - 1, kAlignment) / kAlignment * kAlignment);
  if (data == nullptr) {
    throw std::bad_alloc();
  }
  return data;
}

// Freed memory.
struct Quarantine {
  struct Freed {
    void* data;
    std::size_t bytes;
    c10::Storage storage;  // where it holds the memory
  };

  std::mutex mutex;
  std::deque<Freed> blocks;  // guarded by mutex
  std::size_t bytes = 0;     // guarded by mutex
};

Quarantine& quarantine() {
  static auto* const the_quarantine = new Quarantine;
  return *the_quarantine;
}

// Poisons memory, and frees it later.
void retire(void* data, std::size_t bytes, c10::Storage storage = c10::Storage()) {
  std::memset(data, 0xff, bytes);
  Quarantine& freed = quarantine();
  const std::lock_guard lock(freed.mutex);
  freed.blocks.push_back({data, bytes, std::move(storage)});
  freed.bytes += bytes;
  while (freed.bytes > kQuarantineBytes) {
    const Quarantine::Freed oldest = std::move(freed.blocks.front());
    freed.blocks.pop_front();
    freed.bytes -= oldest.bytes;
    if (!oldest.storage) {
      std::free(oldest.data);
    }
  }
}

// Into a graph, by the fake driver (tests/fakes), where it is loaded.
const void* capture_now() {
  using Capture = const void* (*)();
  const auto capture = reinterpret_cast<Capture>(::dlsym(RTLD_DEFAULT, "fake_driver_capture"));
  return capture != nullptr ? capture() : nullptr;
}

// The context of a DataPtr on the device.
struct Block {
  void* data;
  std::size_t bytes;
  c10::Stream stream;
  c10::Storage storage;  // where it holds the memory
  const void* capture;   // during which it was allocated
  std::mutex mutex;
  std::vector<c10::Stream> used_on;  // guarded by mutex
  std::atomic<int> users{1};         // whoever has allocated it, and kernels
};

void free_block(void* context) {
  auto* const block = static_cast<Block*>(context);
  if (--block->users != 0) {
    return;
  }
  if (block->capture != nullptr) {
    return;  // the graph's, which may be replayed for as long as the process lives
  }
  for (const c10::Stream& stream : block->used_on) {
    make_wait(block->stream, record(stream));
  }
  Queue::of(block->stream).post([block] {
    retire(block->data, block->bytes, std::move(block->storage));
    delete block;
  });
}

c10::DataPtr hold(void* data, std::size_t bytes, c10::DeviceIndex device, c10::Storage storage) {
  open_context(device);
  const c10::Stream stream = current_stream(device);
  auto* const block = new Block{data, bytes, stream, std::move(storage), capture_now(), {}, {}, 1};
  return {data, block, &free_block, c10::Device(c10::DeviceType::CUDA, device)};
}

// What torch's cache has taken of the fake driver's memory (tests/fakes), and does not use.
std::atomic<long> kept_bytes{0};

void reserve_of_driver(long bytes) {
  using Reserve = int (*)(long);
  const auto reserve = reinterpret_cast<Reserve>(::dlsym(RTLD_DEFAULT, "fake_driver_reserve"));
  if (reserve != nullptr) {
    (void)reserve(bytes);
  }
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override { return allocate_on_device(bytes); }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {
    reserve_of_driver(-kept_bytes.exchange(0));
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex /*device*/) override {
    return {};
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex /*device*/) override {}
};

// Which memory is pinned: where each range begins, and its bytes.
class Ranges {
 public:
  void add(void* data, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    ranges_[data] = bytes;
    total_ += bytes;
  }
  // Returns its bytes, or 0 where there is none that begins there.
  std::size_t remove(void* data) {
    const std::lock_guard lock(mutex_);
    const auto found = ranges_.find(data);
    if (found == ranges_.end()) {
      return 0;
    }
    const std::size_t bytes = found->second;
    ranges_.erase(found);
    total_ -= bytes;
    return bytes;
  }
  bool contains(const void* data) {
    const std::lock_guard lock(mutex_);
    auto after = ranges_.upper_bound(const_cast<void*>(data));
    if (after == ranges_.begin()) {
      return false;
    }
    --after;
    const auto* const end = static_cast<const std::byte*>(after->first) + after->second;
    return static_cast<const std::byte*>(data) < end;
  }
  std::size_t total() {
    const std::lock_guard lock(mutex_);
    return total_;
  }

 private:
  std::mutex mutex_;
  std::map<void*, std::size_t> ranges_;  // guarded by mutex_
  std::size_t total_ = 0;                // guarded by mutex_
};

Ranges& pinned() {
  static auto* const ranges = new Ranges;
  return *ranges;
}

Ranges& registered() {
  static auto* const ranges = new Ranges;
  return *ranges;
}

// What became of calls to register memory.
struct Registering {
  std::mutex mutex;
  std::set<int> devices;  // guarded by mutex; those that were current
  std::atomic<bool> refuses{false};
  std::atomic<int> last_error{0};
};
Registering& registering = *new Registering;

void note_device() {
  open_context(current_device());
  const std::lock_guard lock(registering.mutex);
  registering.devices.insert(current_device());
}

void free_pinned(void* data) { retire(data, pinned().remove(data)); }

std::atomic<bool> refuses_to_pin{false};

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    TORCH_CHECK(!refuses_to_pin, "CUDA error: out of memory");
    void* const data = fake_cuda::allocate(bytes);
    pinned().add(data, bytes);
    return {data, data, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  bool record_event(void* /*data*/, void* /*context*/, c10::Stream /*stream*/) override {
    return false;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

}  // namespace

c10::DataPtr allocate_on_device(std::size_t bytes) {
  open_context(current_device());
  return hold(allocate(bytes), bytes, current_device(), c10::Storage());
}

c10::DataPtr move_to_device(c10::Storage storage, c10::DeviceIndex device) {
  void* const data = storage.mutable_data();
  const std::size_t bytes = storage.nbytes();
  return hold(data, bytes, device, std::move(storage));
}

void record_stream(const c10::DataPtr& data, const c10::Stream& stream) {
  if (data.get_deleter() == &free_block) {
    auto* const block = static_cast<Block*>(data.get_context());
    const std::lock_guard lock(block->mutex);
    block->used_on.push_back(stream);
  }
}

std::shared_ptr<void> keep(const c10::DataPtr& data) {
  if (data.get_deleter() != &free_block) {
    return nullptr;
  }
  ++static_cast<Block*>(data.get_context())->users;
  return {data.get_context(), &free_block};
}

bool is_of_capture(const c10::DataPtr& data) {
  const void* const capture = capture_now();
  return capture != nullptr && data.get_deleter() == &free_block &&
         static_cast<const Block*>(data.get_context())->capture == capture;
}

void keep_in_cache(long bytes) {
  kept_bytes += bytes;
  reserve_of_driver(bytes);
}

bool is_freed(const void* data) {
  Quarantine& freed = quarantine();
  const std::lock_guard lock(freed.mutex);
  return std::any_of(freed.blocks.begin(), freed.blocks.end(), [data](const auto& block) {
    const auto* const begin = static_cast<const std::byte*>(block.data);
    return data >= begin && data < begin + block.bytes;
  });
}

bool is_pinned(const void* data) { return pinned().contains(data) || registered().contains(data); }
std::size_t pinned_bytes() { return pinned().total(); }
std::size_t registered_bytes() { return registered().total(); }
std::vector<int> registering_devices() {
  const std::lock_guard lock(registering.mutex);
  return {registering.devices.begin(), registering.devices.end()};
}
void refuse_to_register(bool refuses) { registering.refuses = refuses; }
void refuse_to_pin(bool refuses) { refuses_to_pin = refuses; }

void install_allocators() {
  c10::SetAllocator(c10::DeviceType::CUDA, new DeviceAllocator);
  at::setHostAllocator(c10::DeviceType::CUDA, new PinnedAllocator);
}

}  // namespace fake_cuda

int fake_cuda_is_freed(const void* data) { return fake_cuda::is_freed(data) ? 1 : 0; }

int cudaHostRegister(void* data, std::size_t bytes, unsigned /*flags*/) {
  fake_cuda::note_device();
  if (fake_cuda::registering.refuses) {
    constexpr int kNotSupported = 801;
    fake_cuda::registering.last_error = kNotSupported;
    return kNotSupported;
  }
  fake_cuda::registered().add(data, bytes);
  return 0;
}

int cudaHostUnregister(void* data) {
  fake_cuda::note_device();
  (void)fake_cuda::registered().remove(data);
  return 0;
}

int cudaGetLastError() { return fake_cuda::registering.last_error.exchange(0); }
