// CUDA's driver, opened at run time: streams, events, copies and memory, without CUDA's headers.
//
// One build serves machines with and without CUDA. The driver's interface is stable across CUDA
// versions, and its streams, events and pointers are those of the runtime that torch uses. Every
// function throws TransportError where the driver refuses. Thread safe; a thread works in the
// primary context of a device, see DeviceGuard.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace pydist::cuda {

// As the driver declares them; a null stream is the legacy default stream.
using Stream = void*;
using Event = void*;
using Context = void*;

struct Room {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
};

class Driver {
 public:
  // The driver of this process. Throws TransportError where there is none, with the reason.
  [[nodiscard]] static const Driver& get();
  // Why get() throws; empty where it does not.
  [[nodiscard]] static const std::string& why_missing();

  // Whether the device can write to several at once, through an NVSwitch.
  [[nodiscard]] bool has_multicast(int device) const;

  // A stream that does not wait for the legacy default stream, with the highest priority.
  [[nodiscard]] Stream create_stream() const;
  // On any thread; `context` is the one that it was made in.
  void destroy_stream(Stream stream, Context context) const noexcept;
  // A number that no other stream of this process ever has, also after this one is destroyed.
  [[nodiscard]] std::uint64_t id_of(Stream stream) const;
  // The number, which no other of this process has, of the capture into a graph that the stream is
  // part of. The legacy default stream is never captured.
  [[nodiscard]] std::optional<std::uint64_t> capture_of(Stream stream) const;
  [[nodiscard]] bool is_capturing(Stream stream) const { return capture_of(stream).has_value(); }
  // Whether all that was put on the stream is done. Throws where some of it has failed.
  [[nodiscard]] bool is_idle(Stream stream) const;

  // Events carry no time.
  [[nodiscard]] Event create_event() const;
  void destroy_event(Event event, Context context) const noexcept;
  void record(Event event, Stream stream) const;
  void wait(Stream stream, Event event) const;
  [[nodiscard]] bool is_done(Event event) const;

  // Between any two places, device or host, in stream order.
  void copy(void* to, const void* from, std::size_t bytes, Stream stream) const;

  [[nodiscard]] Context current_context() const;
  // Waits on the host for everything on the current context.
  void synchronize() const;

  // Null where the device has no room; see cuda/device_memory.h.
  [[nodiscard]] void* try_allocate(std::size_t bytes) const;
  // Of the current context's device.
  [[nodiscard]] Room room() const;
  void free(void* data) const noexcept;

 private:
  friend class DeviceGuard;
  friend class RelaxedCapture;
  struct Functions;

  explicit Driver(const Functions& functions) : functions_(functions) {}
  struct Opened;
  [[nodiscard]] static const Opened& opened();
  void check(int code, const char* what) const;

  const Functions& functions_;
};

// Makes the primary context of `device` the calling thread's own, until destroyed.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard();

 private:
  void* previous_ = nullptr;
  bool is_changed_ = false;
};

// Until destroyed, this thread may make calls that a capture into a graph, here or on another
// thread, would forbid: allocate, and ask events.
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept;
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture();

 private:
  int previous_;
};

}  // namespace pydist::cuda
