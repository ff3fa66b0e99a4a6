#include "communicator/nccl/freed_device_memory.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <set>
#include <utility>

#include "base/fork.h"
#include "base/log.h"
#include "communicator/nccl/late_ends.h"
#include "communicator/nccl/streams_of_process.h"
#include "communicator/open_communicators.h"
#include "cuda/driver.h"

namespace pydist {
namespace {

// How long freeing waits for groups that are busy: most are busy for a moment only.
constexpr std::chrono::milliseconds kBusyPatience{250};

constexpr const char* kComplaint =
    "A GPU does not come to an end; pydist's memory on it is not freed.";

}  // namespace

FreedDeviceMemory& FreedDeviceMemory::of_process() {
  static auto* const freed = new FreedDeviceMemory;  // memory may outlive static destructors
  return *freed;
}

void FreedDeviceMemory::free_later(int device, Free free) noexcept {
  if (is_process_ending() || in_forked_child()) {
    return;  // the driver takes back all that the process has
  }
  log_errors_of([&] {
    const std::lock_guard lock(mutex_);
    freed_.push_back({device, std::move(free)});
  });
}

bool FreedDeviceMemory::is_empty(int device) const {
  const std::lock_guard lock(mutex_);
  return std::none_of(freed_.begin(), freed_.end(),
                      [device](const Freed& each) { return each.device == device; });
}

bool FreedDeviceMemory::free_now(int device) {
  if (!StreamsOfProcess::of_process().wait_until_idle(device, kBusyPatience)) {
    return false;
  }
  // Taken before the wait: memory that is dropped after it may be in use.
  std::vector<Freed> taken;
  {
    const std::lock_guard lock(mutex_);
    const auto first =
        std::stable_partition(freed_.begin(), freed_.end(),
                              [device](const Freed& each) { return each.device != device; });
    std::move(first, freed_.end(), std::back_inserter(taken));
    freed_.erase(first, freed_.end());
  }
  if (taken.empty()) {
    return true;
  }
  const auto keep = [this, &taken] {
    const std::lock_guard lock(mutex_);
    std::move(taken.begin(), taken.end(), std::back_inserter(freed_));
  };
  try {
    const cuda::DeviceGuard guard(device);
    const cuda::RelaxedCapture relaxed;
    cuda::Driver::get().synchronize();
    std::erase_if(taken, [](const Freed& each) {
      try {
        return each.free();
      } catch (const std::exception& error) {
        log_line(LogLevel::kError, error.what());
        return false;
      }
    });
  } catch (...) {
    keep();
    throw;
  }
  keep();
  return true;
}

void FreedDeviceMemory::free_all(Deadline deadline) noexcept {
  if (is_process_ending() || in_forked_child()) {
    return;
  }
  log_errors_of([&] {
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
            log_errors_of([&] {
              if (!free_now(device)) {
                log_line(LogLevel::kWarning, kComplaint);
              }
            });
          }
        },
        deadline, kComplaint);
    LateEnds::of_process().join(deadline);
  });
}

}  // namespace pydist
