// The streams of all NCCL groups of this process.
//
// A capture that records a launch also captures the stream of the launch's group until it ends, so
// these streams show every capture that holds something of pydist's. And while one of them is busy,
// a wait for the device may last until a peer comes, or for ever if an operation hangs. So a stream
// that hangs when its group is gone is kept here, and nobody waits for the device until it is idle.
//
// Thread safe.

#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "cuda/stream.h"

namespace pydist {

// Whether the stream, of that device, has nothing to do. False where it is captured, since to ask
// would break the capture. Throws where CUDA has failed.
[[nodiscard]] bool is_idle(const cuda::OwnedStream& stream, int device);

// Throws InvalidUsage for `what` while a CUDA graph is captured that holds operations of pydist's,
// or that the calling thread captures on the device. NCCL waits for the GPU, frees memory and has
// threads of its own, none of which a capture survives. Not once the program has ended.
void require_no_capture(std::string_view what, int device);

class StreamsOfProcess {
 public:
  // Never destroyed.
  [[nodiscard]] static StreamsOfProcess& of_process();

  StreamsOfProcess() = default;
  StreamsOfProcess(const StreamsOfProcess&) = delete;
  StreamsOfProcess& operator=(const StreamsOfProcess&) = delete;

  // On the device, which is current.
  [[nodiscard]] std::shared_ptr<const cuda::OwnedStream> make(int device);
  // Destroys those that only this list still holds and that have nothing to do.
  void prune() noexcept;

  // The capture that is under way with operations of pydist's, if there is one.
  [[nodiscard]] std::optional<std::uint64_t> capture();
  // Waits until no stream of the device is busy or captured, for `patience` at most. Returns
  // whether that is so.
  [[nodiscard]] bool wait_until_idle(int device, std::chrono::milliseconds patience);

 private:
  struct Entry {
    std::shared_ptr<const cuda::OwnedStream> stream;
    int device;

    [[nodiscard]] bool is_idle() const { return pydist::is_idle(*stream, device); }
  };

  std::mutex mutex_;
  std::vector<Entry> streams_;  // guarded by mutex_
};

}  // namespace pydist
