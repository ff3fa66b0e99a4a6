// How all members of a group hear of each other in log2(n) rounds, in each of which every member
// sends one message and gets one: pure arithmetic. From J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal and
// D. Weathersby, "Efficient algorithms for all-to-all communications in multiport message-passing
// systems", IEEE Transactions on Parallel and Distributed Systems 8 (1997). A value.
//
// Members stand in a ring, so d places after member m comes m + d. Where their number is a power of
// 2 it is m XOR d, so that d places before and after are the same member, and the same rounds are
// recursive doubling: two members swap. So each waits for one that waits for it, and where members
// share cores there are fewer switches from one to another (docs/decisions/0015).
//
// In round k a member sends to the one 2^k places before it.
//   All-gather: what it has of itself and of told(k) - 1 members after it. It then gets the same of
//   those from 2^k places after it on.
//   All-to-all: what is to go d places back goes in those rounds k in which bit k of d is set, so
//   it passes through other members on its way.

#pragma once

#include <algorithm>

namespace pydist {

class Rounds {
 public:
  Rounds(int me, int size) noexcept : me_(me), size_(size), swaps_((size & (size - 1)) == 0) {
    while ((size_ - 1) >> count_ != 0) {
      ++count_;
    }
  }

  [[nodiscard]] int count() const noexcept { return count_; }
  [[nodiscard]] int size() const noexcept { return size_; }

  // The member so many places after this one, 0 to size.
  [[nodiscard]] int after(int places) const noexcept {
    return swaps_ ? me_ ^ (places % size_) : (me_ + places) % size_;
  }
  [[nodiscard]] int before(int places) const noexcept {
    return swaps_ ? after(places) : after(size_ - places);
  }
  // How many places after this one a member is, less than size.
  [[nodiscard]] int places_to(int member) const noexcept {
    return swaps_ ? me_ ^ member : (member - me_ + size_) % size_;
  }

  // To whom this one sends in a round, and who sends to it.
  [[nodiscard]] int to(int round) const noexcept { return before(1 << round); }
  [[nodiscard]] int from(int round) const noexcept { return after(1 << round); }

  // All-gather: of how many members a message of the round tells.
  [[nodiscard]] int told(int round) const noexcept {
    return std::min(1 << round, size_ - (1 << round));
  }
  // All-to-all: whether a message of the round takes along what goes `places` back.
  [[nodiscard]] static bool moves(int places, int round) noexcept {
    return ((places >> round) & 1) != 0;
  }
  // How much of that way is behind it at the beginning of the round.
  [[nodiscard]] static int done(int places, int round) noexcept {
    return places & ((1 << round) - 1);
  }

 private:
  int me_;
  int size_;
  bool swaps_;
  int count_ = 0;
};

}  // namespace pydist
