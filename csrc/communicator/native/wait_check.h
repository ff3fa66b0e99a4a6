// When a wait for a peer ends without it: it is lost, or the deadline has passed. And what the log
// says of a wait that lasts, long before that.
//
// All operations of a native group that wait, collectives and messages, look here now and then.

#pragma once

#include <functional>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "communicator/native/group_health.h"
#include "health/long_wait.h"

namespace pydist {

// A spinning waiter checks the clock and its peers' lives once in so many looks at its condition.
inline constexpr unsigned kLooksBetweenChecks = 8;

// One such look. Used by one thread.
class WaitCheck {
 public:
  // Of an operation that waits for `rank`, or for anybody where that is -1.
  WaitCheck(GroupHealth& health, int rank, const Deadline& deadline, LongWait& notice);

  // False as long as there is nothing to do but to go on waiting.
  [[nodiscard]] bool found_anything() const noexcept {
    return ends_the_wait() || is_circle_ || is_long_;
  }
  [[nodiscard]] bool ends_the_wait() const noexcept { return loss_.has_value() || is_late_; }

  // In words, for where the rank is that keeps all waiting.
  using Where = std::function<std::string(const GroupHealth::Keeper& keeper)>;
  // Throws PeerLost or Timeout, or logs that the wait lasts. `operation` is its name for people.
  // The caller has looked once more whether it still waits: what the peer did before it died, or
  // before the deadline, counts.
  void end_or_warn(const std::string& operation, const Where& where);

 private:
  GroupHealth& health_;
  const int rank_;
  std::optional<GroupHealth::Loss> loss_;
  bool is_late_ = false;
  bool is_circle_ = false;
  bool is_long_ = false;
};

}  // namespace pydist
