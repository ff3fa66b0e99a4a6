#include "transport/tcp/segment_targets.h"

#include <algorithm>

namespace pydist {

void SegmentTargets::expect(std::uint64_t number, std::span<std::byte> target) {
  const std::lock_guard lock(mutex_);
  if (!is_closed_) {
    expected_.push_back({number, target});
  }
}

std::byte* SegmentTargets::place(std::uint64_t number, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto expected =
      std::find_if(expected_.begin(), expected_.end(),
                   [number](const Expected& each) { return each.number >= number; });
  const bool is_expected =
      expected != expected_.end() && expected->number == number && expected->target.size() == bytes;
  std::byte* const target = is_expected ? expected->target.data() : nullptr;
  placed_[number % placed_.size()] = target;
  return target;
}

std::byte* SegmentTargets::place_of(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  return placed_[number % placed_.size()];
}

void SegmentTargets::forget_until(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  while (!expected_.empty() && expected_.front().number <= number) {
    expected_.pop_front();
  }
}

void SegmentTargets::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
  expected_.clear();
}

}  // namespace pydist
