#include "streams.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <random>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "fake_cuda.h"

namespace fake_cuda {
namespace {

constexpr int kMostDevices = 8;
constexpr c10::StreamId kPoolStreams = 4;  // of each priority

std::atomic<int> devices{0};
std::atomic<int> delay_us{0};
std::atomic<int> event_waits{0};  // of default streams

struct Current {
  c10::DeviceIndex device = 0;   // what cudaGetDevice says
  c10::DeviceIndex wanted = -1;  // by torch, which has not told CUDA of it; -1: none
  std::array<c10::StreamId, kMostDevices> streams{};
};
thread_local Current current;

std::array<std::atomic<bool>, kMostDevices> has_context{};

struct Registry {
  std::mutex mutex;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Queue*> queues;  // guarded by mutex
};

Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

struct HostWaits {
  std::mutex mutex;
  std::vector<std::string> all;  // guarded by mutex
};

HostWaits& host_waits() {
  static auto* const instance = new HostWaits;
  return *instance;
}

c10::Device device_at(c10::DeviceIndex index) { return {c10::DeviceType::CUDA, index}; }

c10::Stream stream_at(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(device), id);
}

std::shared_ptr<Recording>& recording_of(void* event) {
  return *static_cast<std::shared_ptr<Recording>*>(event);
}

// For who asks on the host.
Recording& uncaptured(void* event) {
  Recording& recording = *recording_of(event);
  TORCH_CHECK(!recording.is_captured(),
              "CUDA error: operation not permitted on an event last recorded in a capturing "
              "stream");
  return recording;
}

// Of the fake driver, if it is there.
template <typename Function>
Function* in_driver(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
}

bool is_captured(const c10::Stream& stream) {
  auto* const ask = in_driver<int(void*)>("fake_driver_is_captured");
  return ask != nullptr && ask(&Queue::of(stream)) != 0;
}

// In CUDA's words.
void join_capture(const c10::Stream& stream, const Recording& recording) {
  TORCH_CHECK(recording.is_captured(),
              "CUDA error: dependency created on uncaptured work in another stream");
  auto* const join = in_driver<int(void*, long)>("fake_driver_join_capture");
  TORCH_CHECK(join != nullptr && join(&Queue::of(stream), recording.captured_point()) != 0,
              "CUDA error: operation not permitted on an event last recorded in a capturing "
              "stream");
}

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

// As torch's guard goes to the device of an event, and back to the thread's own: by cudaSetDevice,
// also where that opens a context.
class OnDevice {
 public:
  explicit OnDevice(c10::DeviceIndex device) { set_device(device); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { set_device(before_); }

 private:
  const c10::DeviceIndex before_ = current_device();
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return device_at(exchange_device(device.index()));
  }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    (void)maybe_exchange_device(device.index());
  }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_at(index_of(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high_priority) const override {
    return next_stream_of_pool(index_of(device), is_high_priority);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  void* getStreamNativeHandle(c10::Stream stream) const override { return &Queue::of(stream); }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count());
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    const OnDevice on_device(stream.device_index());
    if (*event == nullptr) {
      *event = new std::shared_ptr<Recording>;
    }
    recording_of(*event) = fake_cuda::record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) {
      return;
    }
    const OnDevice on_device(stream.device_index());
    fake_cuda_note_wait(&Queue::of(stream));
    if (const auto& recording = recording_of(event);
        recording->is_captured() || is_captured(stream)) {
      join_capture(stream, *recording);
    } else {
      make_wait(stream, recording);
    }
  }
  bool queryEvent(void* event) const override {
    open_context(current.device);  // nobody says that CUDA doesn't
    auto* const permits = in_driver<int()>("fake_driver_permits_unsafe_call");
    TORCH_CHECK(permits == nullptr || permits() != 0,
                "operation not permitted when stream is capturing");
    return event == nullptr || uncaptured(event).has_passed();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      note_host_wait("an event");
      uncaptured(event).wait();
    }
  }
  void destroyEvent(void* event, c10::DeviceIndex device) const noexcept override {
    if (event == nullptr) {
      return;
    }
    const OnDevice on_device(device);
    delete static_cast<std::shared_ptr<Recording>*>(event);
  }
  bool queryStream(const c10::Stream& stream) const override { return Queue::of(stream).is_idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    note_host_wait("a stream");
    Queue::of(stream).drain();
  }
  void synchronizeDevice(c10::DeviceIndex /*device*/) const override { synchronize(); }
};

}  // namespace

Queue& Queue::of(const c10::Stream& stream) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  Queue*& queue = all.queues[{stream.device_index(), stream.id()}];
  if (queue == nullptr) {
    queue = new Queue;
    std::thread([served = queue] { served->serve(); }).detach();
  }
  return *queue;
}

Queue& Queue::of(void* native_handle) {
  return native_handle == nullptr ? of(stream_at(0, 0)) : *static_cast<Queue*>(native_handle);
}

void Queue::post(std::function<void()> job) {
  const std::lock_guard lock(mutex_);
  jobs_.push_back(std::move(job));
  ++posted_;
  changed_.notify_all();
}

void Queue::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this, until = posted_] { return done_ >= until; });
}

bool Queue::is_idle() {
  const std::lock_guard lock(mutex_);
  return done_ == posted_;
}

void Queue::serve() {
  pthread_setname_np(pthread_self(), "fake-cuda");
  std::minstd_rand random(std::random_device{}());
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !jobs_.empty(); });
    std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    if (const int longest = delay_us.load(); longest > 0) {
      std::this_thread::sleep_for(
          std::chrono::microseconds(std::uniform_int_distribution<int>(0, longest)(random)));
    }
    job();
    job = nullptr;
    lock.lock();
    ++done_;
    changed_.notify_all();
  }
}

void Recording::pass() {
  const std::lock_guard lock(mutex_);
  has_passed_ = true;
  changed_.notify_all();
}

void Recording::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return has_passed_; });
}

bool Recording::has_passed() {
  const std::lock_guard lock(mutex_);
  return has_passed_;
}

std::shared_ptr<Recording> record(const c10::Stream& stream) {
  auto* const captured_point = in_driver<long(void*)>("fake_driver_captured_point");
  auto recording = std::make_shared<Recording>(
      captured_point == nullptr ? Recording::kNotCaptured : captured_point(&Queue::of(stream)));
  if (!recording->is_captured()) {
    Queue::of(stream).post([recording] { recording->pass(); });
  }
  return recording;
}

void make_wait(const c10::Stream& stream, std::shared_ptr<Recording> recording) {
  Queue::of(stream).post([recording = std::move(recording)] { recording->wait(); });
}

int device_count() { return devices.load(); }

c10::DeviceIndex current_device() { return current.wanted >= 0 ? current.wanted : current.device; }

void open_context(c10::DeviceIndex device) {
  has_context.at(static_cast<std::size_t>(device)) = true;
}

std::vector<int> contexts() {
  std::vector<int> open;
  for (int device = 0; device < kMostDevices; ++device) {
    if (has_context.at(static_cast<std::size_t>(device))) {
      open.push_back(device);
    }
  }
  return open;
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return stream_at(device, current.streams.at(static_cast<std::size_t>(device)));
}

c10::Stream exchange_stream(const c10::Stream& stream) {
  const c10::DeviceIndex device = stream.device_index();
  return stream_at(
      device, std::exchange(current.streams.at(static_cast<std::size_t>(device)), stream.id()));
}

void set_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "There is no fake CUDA device ", device, ".");
  current.wanted = -1;
  if (std::exchange(current.device, device) != device) {
    open_context(device);
  }
}

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  const c10::DeviceIndex before = current_device();
  set_device(device);
  return before;
}

c10::DeviceIndex maybe_exchange_device(c10::DeviceIndex device) {
  const c10::DeviceIndex before = current_device();
  if (has_context.at(static_cast<std::size_t>(device))) {
    set_device(device);
  } else {
    current.wanted = device;
  }
  return before;
}

c10::Stream next_stream_of_pool(c10::DeviceIndex device, bool is_high_priority) {
  static std::atomic<c10::StreamId> next{0};
  return stream_at(device, 1 + next++ % kPoolStreams + (is_high_priority ? kPoolStreams : 0));
}

void note_host_wait(std::string what) {
  std::array<char, 16> thread{};
  pthread_getname_np(pthread_self(), thread.data(), thread.size());
  if (!std::string_view(thread.data()).starts_with("pydist")) {
    const std::lock_guard lock(host_waits().mutex);
    host_waits().all.push_back(std::move(what));
  }
}

std::vector<std::string> take_host_waits() {
  const std::lock_guard lock(host_waits().mutex);
  return std::exchange(host_waits().all, {});
}

int take_event_waits() { return event_waits.exchange(0); }

void set_delay_us(int longest) { delay_us = longest; }

void synchronize() {
  note_host_wait("all streams");
  std::vector<Queue*> queues;
  {
    const std::lock_guard lock(registry().mutex);
    for (const auto& [key, queue] : registry().queues) {
      queues.push_back(queue);
    }
  }
  for (Queue* const queue : queues) {
    queue->drain();
  }
}

void install_guard(int count) {
  TORCH_CHECK(count >= 1 && count <= kMostDevices, "There can be 1 to ", kMostDevices,
              " fake CUDA devices, not ", count, ".");
  devices = count;
  auto& entry =
      c10::impl::device_guard_impl_registry[static_cast<std::size_t>(c10::DeviceType::CUDA)];
  TORCH_CHECK(entry.load() == nullptr || dynamic_cast<const Guard*>(entry.load()) != nullptr,
              "This torch has CUDA devices of its own.");
  if (entry.load() == nullptr) {
    const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new Guard);
  }
}

}  // namespace fake_cuda

void fake_cuda_enqueue(void* stream, void (*job)(void* argument), void* argument) {
  fake_cuda::Queue::of(stream).post([job, argument] { job(argument); });
}

void fake_cuda_note_wait(void* stream) {
  for (int device = 0; device < fake_cuda::device_count(); ++device) {
    const auto index = static_cast<c10::DeviceIndex>(device);
    fake_cuda::event_waits += stream == &fake_cuda::Queue::of(fake_cuda::stream_at(index, 0));
  }
}

void fake_cuda_synchronize(void* stream) {
  fake_cuda::note_host_wait("a stream");
  fake_cuda::Queue::of(stream).drain();
}
