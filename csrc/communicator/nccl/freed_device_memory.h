// Device memory that nobody uses any more and that is still to be freed.
//
// Device memory may be dropped while kernels still use it, and on a thread that holds locks (the
// GIL, for one) which others need. To free the memory, somebody has to wait for the device first:
// nobody records which streams have used the memory, and not every way of freeing waits for them.
// But such a wait breaks every capture into a CUDA graph that is under way, and pydist cannot know
// of captures on other threads that hold nothing of its own. So the memory goes on a list of the
// process, and is freed where users expect a wait for the device: when more is allocated, and when
// the job is left.
//
// Thread safe. Nothing is called, and nobody waited for, under the lock.

#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <vector>

#include "base/deadline.h"

namespace pydist {

// How long a process that leaves its job waits until the memory is freed.
inline constexpr std::chrono::milliseconds kFreePatience{10'000};

class FreedDeviceMemory {
 public:
  // Never destroyed.
  [[nodiscard]] static FreedDeviceMemory& of_process();

  FreedDeviceMemory() = default;
  FreedDeviceMemory(const FreedDeviceMemory&) = delete;
  FreedDeviceMemory& operator=(const FreedDeviceMemory&) = delete;

  // Returns whether it has freed the memory; if not, it is called again another time. Called in the
  // context of the device, and such that it may do what captures forbid.
  using Free = std::function<bool()>;
  void free_later(int device, Free free) noexcept;

  [[nodiscard]] bool is_empty(int device) const;
  // Waits for the device if there is anything to free, and frees it. If a stream of a group is
  // stuck (streams_of_process.h), keeps everything and returns false. Precondition: the caller
  // knows of no capture.
  [[nodiscard]] bool free_now(int device);
  // Frees the memory of all devices, on a thread that is given up at `deadline`, because a device
  // may hang.
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
