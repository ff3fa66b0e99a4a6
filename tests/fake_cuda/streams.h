// Streams and events of the fake CUDA device: a stream is a queue of jobs and a thread of its own,
// so what is not ordered by an event really happens in any order.
//
// Nothing here is ever destroyed: threads and queues live as long as the process.

#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace fake_cuda {

class Queue {
 public:
  // The native handle of a stream is its queue.
  [[nodiscard]] static Queue& of(const c10::Stream& stream);
  [[nodiscard]] static Queue& of(void* native_handle);

  void post(std::function<void()> job);
  // Waits for what was posted so far.
  void drain();
  [[nodiscard]] bool is_idle();

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;  // guarded by mutex_
  std::uint64_t posted_ = 0;                // guarded by mutex_
  std::uint64_t done_ = 0;                  // guarded by mutex_
};

// A point in a stream's work.
class Recording {
 public:
  static constexpr long kNotCaptured = -1;

  explicit Recording(long captured_point = kNotCaptured) : captured_point_(captured_point) {}

  // Whether the stream was captured into a graph (tests/fakes), and where in that.
  [[nodiscard]] bool is_captured() const { return captured_point_ >= 0; }
  [[nodiscard]] long captured_point() const { return captured_point_; }
  void pass();
  void wait();
  [[nodiscard]] bool has_passed();

 private:
  const long captured_point_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_passed_ = false;  // guarded by mutex_
};

[[nodiscard]] std::shared_ptr<Recording> record(const c10::Stream& stream);
// The stream's later jobs wait.
void make_wait(const c10::Stream& stream, std::shared_ptr<Recording> recording);

[[nodiscard]] int device_count();
// The calling thread's.
[[nodiscard]] c10::DeviceIndex current_device();
[[nodiscard]] c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(const c10::Stream& stream);
// As torch's functions of these names do: cudaSetDevice, which opens the device's context, unless
// the device is the current one. The last only remembers a device that has no context yet.
void set_device(c10::DeviceIndex device);
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
c10::DeviceIndex maybe_exchange_device(c10::DeviceIndex device);

// Of the process: what costs some hundred MB of a real device, and may be refused.
void open_context(c10::DeviceIndex device);
// The devices that have one.
[[nodiscard]] std::vector<int> contexts();

[[nodiscard]] c10::Stream next_stream_of_pool(c10::DeviceIndex device, bool is_high_priority);

// A thread of the host waits for the device from here on, in `what`. Threads of the engine's own do
// not count: nothing that trains waits for them.
void note_host_wait(std::string what);
// The waits since the last call.
[[nodiscard]] std::vector<std::string> take_host_waits();

// The events that default streams have been told to wait for, since the last call.
[[nodiscard]] int take_event_waits();

// Before each job a stream sleeps for a random time of at most so many microseconds.
void set_delay_us(int longest);

// Waits for all streams.
void synchronize();

// Registers the device guard with torch, as that of `count` CUDA devices.
void install_guard(int count);

}  // namespace fake_cuda
