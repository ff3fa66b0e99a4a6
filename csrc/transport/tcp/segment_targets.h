// Where a receiver wants the segments that come to it over the network, where that is not a slot:
// what has its place in a buffer of the user's is read from the socket into that, and copied by
// nobody.
//
// Thread safe: the receiver expects segments, whoever serves the network places them.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>

#include "transport/lane_segment.h"

namespace pydist {

class SegmentTargets {
 public:
  // -- for the receiver --------------------------------------------------------------------------
  // The segment of that number may be put there, if it has not begun to come. Numbers ascend.
  void expect(std::uint64_t number, std::span<std::byte> target);
  // Where the segment has been put, once it is there; null: into its slot.
  [[nodiscard]] std::byte* place_of(std::uint64_t number);
  // All up to that one have been received.
  void forget_until(std::uint64_t number);

  // -- for the server ----------------------------------------------------------------------------
  // Where to put the segment, which begins to come and is so long; null: into its slot.
  [[nodiscard]] std::byte* place(std::uint64_t number, std::size_t bytes);

  // From now on all go into their slots. Any thread. One that has begun to come goes on: its frame
  // has to be dropped, see TcpNode::drop().
  void close();

 private:
  struct Expected {
    std::uint64_t number;
    std::span<std::byte> target;
  };

  std::mutex mutex_;
  std::deque<Expected> expected_;                    // by number; guarded by mutex_
  std::array<std::byte*, kMostLaneSlots> placed_{};  // by number; guarded by mutex_
  bool is_closed_ = false;                           // guarded by mutex_
};

}  // namespace pydist
