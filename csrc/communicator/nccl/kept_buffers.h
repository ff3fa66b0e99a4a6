// The buffers of operations that were given up while the GPU may still read and write them.
//
// A group that fails breaks its operations off, and their callers get the error once the kernels
// have ended. Where that takes too long, or nobody can tell (NCCL's abort hangs, a kernel heeds no
// abort), they get it nevertheless, and drop their tensors. That memory must not become anybody
// else's: it is kept here until the group's stream has nothing to do any more, and otherwise as
// long as the process lives. The stream tells enough, as a group that has failed puts nothing more
// on it.
//
// Nobody waits for these streams. They are asked now and then: by the thread that asks for the ends
// of operations (NcclGroup::settle()), and when the process leaves its job. Memory goes back on a
// thread of its own (late_ends.h), because an allocator may wait for the device, and a deleter for
// the GIL.
//
// Thread safe. Nothing is called under the lock that keep() takes, so keep() waits for no driver.

#pragma once

#include <atomic>
#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <span>

#include "communicator/buffer_owner.h"
#include "communicator/operation.h"
#include "cuda/stream.h"

namespace pydist {

class KeptBuffers {
 public:
  // Never destroyed: what is kept when the process ends is given back to nobody.
  [[nodiscard]] static KeptBuffers& of_process();

  KeptBuffers() = default;
  KeptBuffers(const KeptBuffers&) = delete;
  KeptBuffers& operator=(const KeptBuffers&) = delete;

  struct Held {
    BufferOwnerPtr owner;
    std::shared_ptr<const cuda::OwnedStream> stream;
    int device;
  };
  // What operations hold while they are under way. Made before they are launched, so that to keep
  // it allocates nothing.
  using Holding = std::list<Held>;

  // Each owner once.
  [[nodiscard]] static Holding hold(std::span<const Operation> operations,
                                    const std::shared_ptr<const cuda::OwnedStream>& stream,
                                    int device);
  // Of different blocks.
  [[nodiscard]] static std::size_t bytes_of(const Holding& holding);

  // Until the stream is idle.
  void keep(Holding holding) noexcept;
  // For operations that are over: drops what others hold, too, and keeps the rest, which
  // the calling thread must not give back.
  void let_go(Holding holding) noexcept;

  // Gives back what its stream is done with. May take as long as the driver takes to answer.
  void release() noexcept;

  [[nodiscard]] bool is_empty() const noexcept { return count_ == 0; }

 private:
  std::mutex release_mutex_;  // of the one who takes out
  std::mutex mutex_;
  Holding held_;  // guarded by mutex_
  // How many are kept. One that release() tries to give back still counts, because the thread that
  // asks for the ends of operations sleeps where none is kept.
  std::atomic<std::size_t> count_{0};
};

}  // namespace pydist
