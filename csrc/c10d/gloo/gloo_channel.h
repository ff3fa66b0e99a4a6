// torch's gloo backend as blocking, typed primitives on plain memory.
//
// Only c10d::Backend is used, since torch ships no header of gloo's. Data moves as bytes; the one
// reduction is a sum of a type that gloo has. Collectives are for one thread at a time;
// point-to-point operations and close() may be called from any thread.
//
// Failures are Timeout, PeerLost or TransportError; after one the connections are of no use.

#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/dtype.h"
#include "c10d/gloo/gloo_control.h"

namespace c10d {
class Backend;
class Work;
}  // namespace c10d

namespace pydist {

class GlooChannel {
 public:
  // Tags from here on are the channel's own.
  static constexpr std::uint64_t kUserTags = 0x70000000;

  GlooChannel(c10::intrusive_ptr<c10d::Backend> backend, int rank, int size);
  GlooChannel(const GlooChannel&) = delete;
  GlooChannel& operator=(const GlooChannel&) = delete;
  ~GlooChannel();

  // From now on whoever waits in a collective calls `look` now and then; null: nothing. For the
  // thread whose turn it is, and not where that exchanges messages (gather, scatter): torch gives
  // them up where a wait for them runs out of time.
  void while_waiting(std::function<void()> look) { look_ = std::move(look); }

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return size_; }

  // Whether gloo itself sums the type.
  [[nodiscard]] static bool can_sum(DType dtype) noexcept;

  void all_reduce_sum(void* data, std::size_t count, DType dtype, Deadline deadline);
  // `output` holds one block of `bytes` for each rank; `input` may lie in it.
  void all_gather(const void* input, void* output, std::size_t bytes, Deadline deadline);
  void broadcast(void* data, std::size_t bytes, int root, Deadline deadline);
  // Blocks in rank order, without gaps; sizes in bytes.
  void all_to_all(const void* input, const std::vector<std::int64_t>& input_bytes, void* output,
                  const std::vector<std::int64_t>& output_bytes, Deadline deadline);
  void barrier(Deadline deadline);

  // all_gather() of a few bytes from each rank: over connections of our own, once there are any.
  void gather_records(const void* mine, void* all, std::size_t bytes, Deadline deadline);
  // Those connections; before the first call of gather_records().
  void use_control(std::unique_ptr<GlooControl> control) noexcept;

  // A message under way; the memory must stay until it has been waited for.
  struct MessageState;
  using Message = std::shared_ptr<MessageState>;
  [[nodiscard]] Message post_send(const void* data, std::size_t bytes, int peer, std::uint64_t tag);
  [[nodiscard]] Message post_recv(void* data, std::size_t bytes, int peer, std::uint64_t tag);
  // Returns the source of a receive.
  static int finish(const Message& message, Deadline deadline);

  // Returns once `peer` has said farewell, with the number that it said, or with nothing where the
  // connection to it is lost or has been cut. Only once for a peer.
  [[nodiscard]] std::optional<std::uint64_t> wait_for_farewell(int peer) noexcept;
  // Tells it to `peer`, which waits for it in wait_for_farewell().
  void say_farewell(int peer, std::uint64_t number, Deadline deadline) noexcept;

  // Cuts all connections: every wait on them fails, here and on the peers. Any thread, any time.
  void close() noexcept;

  // Lets the backend go, which closes the connections; no operation may be under way or follow.
  void release() noexcept;

  // The same without destroying it, where an operation is: the destructor would wait for it. Nor
  // are the connections of our own, which such an operation may use.
  void abandon() noexcept;

 private:
  void await(c10d::Work& work) const;
  void copy_own_block(const void* input, void* output, std::size_t bytes) const;

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::function<void()> look_;
  // close() may be called by whatever fails the group, also while another thread lets it go.
  std::mutex end_mutex_;
  std::unique_ptr<GlooControl> control_;  // may be null
  const int rank_;
  const int size_;
};

}  // namespace pydist
