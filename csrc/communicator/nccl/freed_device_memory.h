// Device memory that nobody uses any more and that is still to be freed.
//
// Whoever lets go of device memory may do so while kernels use it, and holding locks (the GIL, for
// one) that others need to get on. To free it is to wait for the device first, since nobody tells
// which streams have used it, and not every way of freeing waits for them. Nor does a capture into
// a CUDA graph survive that somebody waits, wherever it goes on; and of those that hold nothing of
// pydist's, on another thread, pydist cannot know. So memory goes on a list of the process's, and
// is freed where users expect the device to be waited for: when more is allocated, and when the job
// is left.
//
// Thread safe. Nothing is called, and nobody waited for, under the lock.

#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <vector>

#include "base/deadline.h"

namespace pydist {

// How long whoever leaves the job waits for memory to be freed.
inline constexpr std::chrono::milliseconds kFreePatience{10'000};

class FreedDeviceMemory {
 public:
  // Never destroyed.
  [[nodiscard]] static FreedDeviceMemory& of_process();

  FreedDeviceMemory() = default;
  FreedDeviceMemory(const FreedDeviceMemory&) = delete;
  FreedDeviceMemory& operator=(const FreedDeviceMemory&) = delete;

  // Returns whether it has freed; otherwise it is called again, another time. Called in the
  // context of the device, where a capture forbids nothing.
  using Free = std::function<bool()>;
  void free_later(int device, Free free) noexcept;

  [[nodiscard]] bool is_empty(int device) const;
  // Waits for the device, if there is anything to free; not where a stream of a group does not come
  // to an end (group_streams.h), then all is kept and it returns false. The caller knows of no
  // capture.
  [[nodiscard]] bool free_now(int device);
  // That of all devices, on a thread that is given up at `deadline`: a device may hang.
  void free_all(Deadline deadline) noexcept;

 private:
  struct Freed {
    int device;
    Free free;
  };

  mutable std::mutex mutex_;
  std::vector<Freed> freed_;  // guarded by mutex_
};

}  // namespace pydist
