// A one-way road of slots from one rank to another: the seam between algorithms that pass data
// from rank to rank and what carries it.
//
// The sender fills a free slot and sends it, or sends what lies elsewhere as if it were in one; the
// receiver looks at the slot in place and releases it. Slots arrive in order, each as long as it
// was sent. Each end is used by one thread at a time. Nothing here blocks: the conditions say when
// the next step is possible, and for whom an end waits until then. A peer that is lost is known by
// the health of the group, which ends every wait for it; so a channel has no errors of its own.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "health/condition.h"

namespace pydist {

class SendChannel {
 public:
  virtual ~SendChannel() = default;

  // The largest piece that one slot takes; the same at both ends.
  [[nodiscard]] virtual std::size_t slot_bytes() const noexcept = 0;

  // How many slots to have under way at a time: at least one, fewer than there are, and as many on
  // all ranks of a ring. More of them hide how long one takes to arrive; with fewer, what is passed
  // on is still in the cache.
  [[nodiscard]] virtual std::size_t window() const noexcept = 0;

  // That there is a free slot.
  [[nodiscard]] virtual Condition until_free() = 0;
  // The free slot, to be filled in.
  [[nodiscard]] virtual std::byte* slot() = 0;
  // Sends the first `bytes` of it.
  virtual void send(std::size_t bytes) = 0;
  // Sends `bytes` of `data` in the free slot's place: at most slot_bytes(), which stay as they are
  // until until_written() holds.
  virtual void send_from(const std::byte* data, std::size_t bytes) = 0;

  // That nothing that was given to send_from() is needed there any more.
  [[nodiscard]] virtual Condition until_written() = 0;

  // The same, and that its slots may be used for something else: where they lie in memory that has
  // other uses, that the receiver has released everything that was sent.
  [[nodiscard]] virtual Condition until_reusable() = 0;
};

class ReceiveChannel {
 public:
  virtual ~ReceiveChannel() = default;

  // How many have been released, ever.
  [[nodiscard]] virtual std::uint64_t released() const noexcept = 0;
  // Says where the segment belongs that will be the `number`-th, from 1. A channel may put it
  // there, and not into a slot, if it is as long as that: slot() is then where it belongs, and
  // nothing is to be copied. From now on nobody needs what lies there, which is the channel's until
  // the segment has been received. Segments are expected in the order in which they come.
  virtual void expect(std::uint64_t /*number*/, std::span<std::byte> /*target*/) {}

  // That the next slot has arrived.
  [[nodiscard]] virtual Condition until_received() = 0;
  // What has been sent in it.
  [[nodiscard]] virtual std::span<const std::byte> slot() = 0;
  // Lets the sender reuse it.
  virtual void release() = 0;
};

}  // namespace pydist
