// The streams of all NCCL groups of this process.
//
// Whatever a launch is captured into captures its group's stream as well, until the capture ends:
// so they tell of every capture that holds something of pydist's. And as long as one of them has
// something to do, the device does not come to an end: not before a peer comes, or never, where an
// operation hangs. A stream that hangs when its group is gone is kept, so that nobody waits for the
// device, for as long as it does.
//
// Thread safe.

#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/stream.h"

namespace pydist {

class GroupStreams {
 public:
  // Never destroyed.
  [[nodiscard]] static GroupStreams& of_process();

  GroupStreams() = default;
  GroupStreams(const GroupStreams&) = delete;
  GroupStreams& operator=(const GroupStreams&) = delete;

  // On the device, which is current.
  [[nodiscard]] std::shared_ptr<const cuda::OwnedStream> make(int device);
  // Destroys those that only this list still holds and that have nothing to do.
  void prune() noexcept;

  [[nodiscard]] bool are_captured();
  // Returns whether none on the device has anything to do, or is captured; waits for that.
  [[nodiscard]] bool wait_until_idle(int device, std::chrono::milliseconds patience);

 private:
  struct Entry {
    std::shared_ptr<const cuda::OwnedStream> stream;
    int device;

    [[nodiscard]] bool is_captured() const;
    [[nodiscard]] bool is_idle() const;  // false where it is captured
  };

  std::mutex mutex_;
  std::vector<Entry> streams_;  // guarded by mutex_
};

}  // namespace pydist
