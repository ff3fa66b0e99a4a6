// A point in time after which a wait gives up. Every wait in the engine takes one.

#pragma once

#include <algorithm>
#include <chrono>

namespace pydist {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // Far enough to never pass, near enough for arithmetic not to overflow.
  [[nodiscard]] static Deadline never() noexcept { return Deadline(Clock::time_point::max()); }
  [[nodiscard]] static Deadline at(Clock::time_point when) noexcept { return Deadline(when); }
  // A duration too long to add to the clock means never.
  [[nodiscard]] static Deadline in(std::chrono::nanoseconds duration,
                                   Clock::time_point now = Clock::now()) noexcept {
    if (duration >= Clock::time_point::max() - now) {
      return never();
    }
    return Deadline(now + duration);
  }

  [[nodiscard]] bool is_never() const noexcept { return when_ == Clock::time_point::max(); }
  [[nodiscard]] bool has_passed() const noexcept { return !is_never() && has_passed(Clock::now()); }
  [[nodiscard]] bool has_passed(Clock::time_point now) const noexcept {
    return !is_never() && now >= when_;
  }
  [[nodiscard]] Clock::time_point when() const noexcept { return when_; }

  // What is left, between zero and `cap`.
  [[nodiscard]] std::chrono::nanoseconds remaining(std::chrono::nanoseconds cap) const noexcept {
    if (is_never()) {
      return cap;
    }
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(when_ - Clock::now());
    return std::clamp(left, std::chrono::nanoseconds::zero(), cap);
  }

  [[nodiscard]] Deadline earlier_of(Deadline other) const noexcept {
    return Deadline(std::min(when_, other.when_));
  }

 private:
  explicit Deadline(Clock::time_point when) noexcept : when_(when) {}

  Clock::time_point when_;
};

}  // namespace pydist
