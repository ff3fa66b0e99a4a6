// What the log tells of a wait that lasts, long before its deadline: for whom it is. Once for each
// wait, and the same on every backend.

#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "base/deadline.h"

namespace pydist {

// How long a wait may last before the log tells of it.
inline constexpr std::chrono::seconds kLongWait{60};

// Of one wait. For one thread at a time.
class LongWait {
 public:
  // Of a wait that begins with the first question.
  LongWait() = default;
  // Of one that begins now.
  explicit LongWait(std::chrono::nanoseconds patience) : due_(Deadline::in(patience)) {}

  // Whether it is time to tell of it, which it is once.
  [[nodiscard]] bool is_due(std::chrono::nanoseconds patience) noexcept {
    if (!due_) {
      due_ = Deadline::in(patience);
    }
    if (!due_->has_passed()) {
      return false;
    }
    due_ = Deadline::never();
    return true;
  }
  // Until when it is not.
  [[nodiscard]] Deadline due() const noexcept { return due_.value_or(Deadline::never()); }

 private:
  std::optional<Deadline> due_;
};

// "rank 0 (pid 71 on host a) has been in barrier #3 of group 'world' for 60 s: rank 1 ...". `why`
// is a sentence without its full stop, and may be empty.
[[nodiscard]] std::string long_wait_text(const std::string& who, const std::string& operation,
                                         std::chrono::nanoseconds patience, const std::string& why);

}  // namespace pydist
