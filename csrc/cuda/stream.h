// A stream and an event that end with their owner; in a forked child they are left alone, since
// CUDA is the parent's. See cuda/driver.h; not thread safe by themselves.

#pragma once

#include "base/fork.h"
#include "cuda/driver.h"

namespace pydist::cuda {

// A stream of the highest priority on the device that was current when it was made.
class OwnedStream {
 public:
  OwnedStream() : stream_(Driver::get().create_stream()) {}
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  // What was put on it is still done.
  ~OwnedStream() {
    if (!in_forked_child()) {
      Driver::get().destroy_stream(stream_, context_);
    }
  }

  [[nodiscard]] Stream get() const noexcept { return stream_; }

 private:
  const Context context_ = Driver::get().current_context();
  Stream stream_;
};

class OwnedEvent {
 public:
  OwnedEvent() : event_(Driver::get().create_event()) {}
  OwnedEvent(const OwnedEvent&) = delete;
  OwnedEvent& operator=(const OwnedEvent&) = delete;
  ~OwnedEvent() {
    if (!in_forked_child()) {
      Driver::get().destroy_event(event_, context_);
    }
  }

  // Marks the work that has been put on `stream` so far.
  void record(Stream stream) const { Driver::get().record(event_, stream); }
  // Makes `stream` wait until the marked work is done.
  void hold_back(Stream stream) const { Driver::get().wait(stream, event_); }
  [[nodiscard]] bool is_done() const { return Driver::get().is_done(event_); }

 private:
  const Context context_ = Driver::get().current_context();
  Event event_;
};

}  // namespace pydist::cuda
