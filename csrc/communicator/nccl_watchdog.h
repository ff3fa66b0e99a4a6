// The thread that watches over all NCCL groups of a process; see Note [How a group fails] in
// communicator/nccl_group.h. It never takes the GIL, and never ends the process.
//
// It runs while any group is there and sleeps while nothing is under way. Thread safe.

#pragma once

#include <memory>

namespace pydist {

class NcclGroup;

class NcclWatchdog {
 public:
  // The one of this process, which lives as long as anybody holds it.
  [[nodiscard]] static std::shared_ptr<NcclWatchdog> of_process();

  NcclWatchdog();
  NcclWatchdog(const NcclWatchdog&) = delete;
  NcclWatchdog& operator=(const NcclWatchdog&) = delete;
  // Joins the thread.
  ~NcclWatchdog();

  // From now until it is gone; it is not kept alive.
  void watch(const std::shared_ptr<NcclGroup>& group);
  // Something is under way.
  void wake() noexcept;

 private:
  struct Shared;
  static void run(const std::shared_ptr<Shared>& shared);

  const std::shared_ptr<Shared> shared_;
};

}  // namespace pydist
