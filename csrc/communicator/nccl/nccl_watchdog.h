// The threads that watch over all NCCL groups of a process; see Note [How a group fails] and
// Note [Two threads that look] in communicator/nccl/nccl_group.h. They never take the GIL, and
// never end the process.
//
// They run while any group is there and sleep while nothing is under way. Thread safe.

#pragma once

#include <cstddef>
#include <memory>

#include "base/log_queue.h"

namespace pydist {

class NcclGroup;

class NcclWatchdog {
 public:
  // The one of this process, which lives as long as anybody holds it.
  [[nodiscard]] static std::shared_ptr<NcclWatchdog> of_process();

  NcclWatchdog();
  NcclWatchdog(const NcclWatchdog&) = delete;
  NcclWatchdog& operator=(const NcclWatchdog&) = delete;
  // Joins the threads, but for one that the driver does not give back.
  ~NcclWatchdog();

  // From now until it is gone; it is not kept alive.
  void watch(const std::shared_ptr<NcclGroup>& group);
  // Something is under way.
  void wake() noexcept;
  // For lines of the thread that watches, which must not wait for a reader.
  [[nodiscard]] LogQueue& log() noexcept { return log_; }

 private:
  struct Shared;
  static void run(const std::shared_ptr<Shared>& shared, std::size_t number);

  LogQueue log_;
  const std::shared_ptr<Shared> shared_;
};

}  // namespace pydist
