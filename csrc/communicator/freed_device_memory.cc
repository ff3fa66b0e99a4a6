#include "communicator/freed_device_memory.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

#include "base/fork.h"
#include "base/log.h"
#include "communicator/late_ends.h"
#include "communicator/open_communicators.h"
#include "cuda/driver.h"

namespace pydist {

FreedDeviceMemory& FreedDeviceMemory::of_process() {
  static auto* const freed = new FreedDeviceMemory;  // memory may outlive static destructors
  return *freed;
}

void FreedDeviceMemory::free_later(int device, Free free) noexcept {
  if (is_process_ending() || in_forked_child()) {
    return;  // the driver takes back all that the process has
  }
  try {
    const std::lock_guard lock(mutex_);
    freed_.push_back({device, std::move(free)});
  } catch (const std::exception& error) {
    log_line(LogLevel::kError, error.what());
  }
}

bool FreedDeviceMemory::is_empty(int device) const {
  const std::lock_guard lock(mutex_);
  return std::none_of(freed_.begin(), freed_.end(),
                      [device](const Freed& each) { return each.device == device; });
}

void FreedDeviceMemory::free_now(int device) {
  // Before the wait: what comes after it may be in use.
  std::vector<Freed> taken;
  {
    const std::lock_guard lock(mutex_);
    if (given_up_.count(device) != 0) {
      return;
    }
    const auto first =
        std::stable_partition(freed_.begin(), freed_.end(),
                              [device](const Freed& each) { return each.device != device; });
    std::move(first, freed_.end(), std::back_inserter(taken));
    freed_.erase(first, freed_.end());
  }
  if (taken.empty()) {
    return;
  }
  const auto keep = [this, &taken] {
    const std::lock_guard lock(mutex_);
    std::move(taken.begin(), taken.end(), std::back_inserter(freed_));
  };
  try {
    const cuda::DeviceGuard guard(device);
    const cuda::RelaxedCapture relaxed;
    cuda::Driver::get().synchronize();
    std::erase_if(taken, [](const Freed& each) { return each.free(); });
  } catch (...) {
    keep();
    throw;
  }
  keep();
}

void FreedDeviceMemory::give_up(int device) {
  const std::lock_guard lock(mutex_);
  given_up_.insert(device);
}

void FreedDeviceMemory::free_all(Deadline deadline) noexcept {
  if (is_process_ending() || in_forked_child()) {
    return;
  }
  try {
    std::set<int> devices;
    {
      const std::lock_guard lock(mutex_);
      for (const Freed& each : freed_) {
        devices.insert(each.device);
      }
    }
    if (devices.empty()) {
      return;
    }
    LateEnds::of_process().start(
        "pydist-free",
        [this, devices] {
          for (const int device : devices) {
            try {
              free_now(device);
            } catch (const std::exception& error) {
              log_line(LogLevel::kError, error.what());
            }
          }
        },
        deadline, "A GPU does not come to an end; pydist's memory on it is not freed.");
    LateEnds::of_process().join(deadline);
  } catch (const std::exception& error) {
    log_line(LogLevel::kError, error.what());
  }
}

}  // namespace pydist
