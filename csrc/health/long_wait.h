// What the log tells of a wait that lasts, long before its deadline: for whom it is. Once for each
// wait, and the same on every backend; sooner where ranks are seen to wait for each other in a
// circle.

#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "base/deadline.h"

namespace pydist {

// How long a wait may last before the log tells of it.
inline constexpr std::chrono::seconds kLongWait{60};
// How long one lasts before a circle is looked for, and how often from then on.
inline constexpr std::chrono::seconds kCircleWait{1};
inline constexpr std::chrono::milliseconds kCircleLooks{250};
// How long one lasts before ranks of other hosts are asked.
inline constexpr std::chrono::milliseconds kAskWait{200};

// Of one wait. For one thread at a time. Who asks several questions at once reads the clock once.
class LongWait {
 public:
  using Clock = Deadline::Clock;

  // Of a wait that begins with the first question.
  LongWait() = default;
  // Of one that begins now.
  explicit LongWait(std::chrono::nanoseconds patience) : due_(Deadline::in(patience)) {}

  // Whether it is time to tell of it, which it is once.
  [[nodiscard]] bool is_due(std::chrono::nanoseconds patience,
                            Clock::time_point now = Clock::now()) noexcept {
    if (!due_) {
      due_ = Deadline::in(patience, now);
    }
    if (!due_->has_passed(now)) {
      return false;
    }
    set_told();
    return true;
  }
  // Nothing more is to be told of it.
  void set_told() noexcept {
    due_ = Deadline::never();
    look_ = Deadline::never();
  }

  // Whether it is time to look for a circle of waits, as long as nothing has been told.
  [[nodiscard]] bool is_time_to_look(Clock::time_point now) noexcept {
    return comes_due(look_, kCircleWait, now);
  }
  // Whether it has lasted long enough to ask other hosts what their ranks do, which is asked now
  // and then from there on.
  [[nodiscard]] bool is_time_to_ask(Clock::time_point now) noexcept {
    return comes_due(ask_, kAskWait, now);
  }
  // Until when it is not.
  [[nodiscard]] Deadline due() const noexcept { return due_.value_or(Deadline::never()); }

 private:
  // First after `first`, then every kCircleLooks.
  [[nodiscard]] static bool comes_due(std::optional<Deadline>& next, std::chrono::nanoseconds first,
                                      Clock::time_point now) noexcept {
    if (!next) {
      next = Deadline::in(first, now);
    }
    if (!next->has_passed(now)) {
      return false;
    }
    next = Deadline::in(kCircleLooks, now);
    return true;
  }

  std::optional<Deadline> due_;
  std::optional<Deadline> look_;
  std::optional<Deadline> ask_;
};

// "rank 0 (pid 71 on host a) has been in barrier #3 of group 'world' for 60 s: rank 1 ...". `why`
// is a sentence without its full stop, and may be empty.
[[nodiscard]] std::string long_wait_text(const std::string& who, const std::string& operation,
                                         std::chrono::nanoseconds patience, const std::string& why);

}  // namespace pydist
