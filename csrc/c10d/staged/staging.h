// Staging: how the parts of operations on device memory pass through pinned host memory.
//
// Operations under way share it with the communicator (staged_communicator.h), which they may
// outlive.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "base/deadline.h"
#include "c10d/device_streams.h"
#include "communicator/communicator.h"
#include "communicator/staging_parts.h"

namespace pydist {

// An operation on device memory, from submit() on.
struct Staged {
  Operation operation;
  Device device;
  EventPtr ready;  // work that was on the device before the copy
  Deadline deadline;
  WorkPtr work;

  // Whoever submitted it still holds the memory, so that this thread is not the one who gives it
  // back.
  void finish(std::exception_ptr error = nullptr, int source_rank = -1) {
    operation.owner = nullptr;
    work->finish(std::move(error), source_rank);
  }
};

using StagedPtr = std::shared_ptr<Staged>;

class Staging {
 public:
  Staging(CommunicatorPtr host, std::size_t slot_bytes)
      : host_(std::move(host)),
        slot_bytes_(std::max(slot_bytes, StagingParts::least_slot_bytes(host_->size()))),
        has_symmetric_memory_(host_->capabilities().symmetric_memory) {}

  [[nodiscard]] Communicator& host() const noexcept { return *host_; }

  // How many of the jobs that were posted are not over yet.
  std::atomic<int> collectives_under_way{0};
  std::atomic<int> sends_under_way{0};

  // Runs a collective, on the thread of the collectives.
  void run(Staged& staged);

  // Copies a message to the host, and sends it.
  void send(const StagedPtr& staged);

  // Copies the results that have arrived on the host to the device.
  void deliver(Staged& staged, const std::shared_ptr<c10::DataPtr>& memory, int source_rank);

  [[nodiscard]] StagedPart part_of_message(const Operation& operation, void* memory) const;

  [[nodiscard]] std::shared_ptr<c10::DataPtr> message_memory(const Staged& staged) const;

 private:
  // Host memory that parts pass through.
  struct Slots {
    MemoryPtr symmetric;                  // where the backend has such memory
    std::unique_ptr<PinnedRange> pinned;  // of it
    c10::DataPtr ordinary;                // otherwise
    std::byte* data = nullptr;
  };

  // One for each direction, so that the two engines of a device that copy work at a time.
  struct Streams {
    c10::Stream to_host;
    c10::Stream to_device;
  };

  Streams streams_of(Device device);

  void run_parts(const Staged& staged, Slots& own, bool& has_begun);

  static void copy_to_host(const StagedPart& part, std::byte* slot, Device device,
                           const Streams& streams);

  static void copy_to_device(const StagedPart& part, const std::byte* slot, Device device,
                             const Streams& streams);

  // See Note [Three slots].
  Slots& shared_slots(Device device);

  void require_sound() const;

  void await(const Staged& staged, const c10::Event& event) const;

  // Memory that a late copy still writes, so that nobody else may have it. One to the host only
  // reads the caller's.
  template <typename Held>
  static void keep_for_ever(Held held) {
    new Held(std::move(held));
  }

  // Waits for copies that are under way, because they read and write memory that the caller gets
  // back.
  bool are_copies_over(Device device) noexcept;

  // Fails the group, because the peers wait for an operation that does not come. Not needed where
  // the host's communicator has told them, or refuses the operation on all ranks alike.
  void give_up(Staged& staged, const std::exception_ptr& error, bool has_begun);

  const CommunicatorPtr host_;
  const std::size_t slot_bytes_;
  const bool has_symmetric_memory_;
  std::mutex mutex_;
  std::map<int, Streams> streams_;  // guarded by mutex_
  // By the thread of the collectives only.
  Slots slots_;
};

}  // namespace pydist
