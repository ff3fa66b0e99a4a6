#include "transport/message_ways.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdint>

namespace pydist {
namespace {

// Candidates of a chooser.
constexpr std::size_t kLane = 0;
constexpr std::size_t kRead = 1;

}  // namespace

MessageWays::Way MessageWays::choose(std::size_t bytes, bool do_both_send, Time now) {
  Way way;
  const int length = std::bit_width(bytes - 1);
  if (!rhythm_ || length > kLongestClass) {
    return way;
  }
  auto found = classes_.find({do_both_send, length});
  if (found == classes_.end()) {
    CandidateChooser chooser(/*count=*/2, /*usual=*/kLane,
                             /*seed=*/static_cast<std::uint64_t>(length), *rhythm_);
    found = classes_.emplace(std::pair(do_both_send, length), Class{std::move(chooser)}).first;
  }
  Class& its = found->second;
  if (its.is_timing) {
    way.is_read_ = its.is_timing_read;
    return way;
  }
  const CandidateChooser::Plan plan = its.chooser.next();
  way.is_read_ = plan.candidate == kRead;
  if (plan.is_timed) {
    its.is_timing = true;
    its.is_timing_read = way.is_read_;
    way.timed_ = &its;
    // As for the longest message of the class, so that others of it compare.
    way.scale_ = static_cast<double>(std::size_t{1} << length) / static_cast<double>(bytes);
    way.begin_ = now;
  }
  return way;
}

void MessageWays::note(const Way& way, Time since, Time now) {
  if (way.timed_ != nullptr) {
    const std::chrono::duration<double, std::micro> took = now - std::max(way.begin_, since);
    way.timed_->chooser.note(way.is_read_ ? kRead : kLane, took.count() * way.scale_);
    way.timed_->is_timing = false;
  }
}

void MessageWays::drop(Way& way) noexcept {
  if (way.timed_ != nullptr) {
    way.timed_->is_timing = false;
    way.timed_ = nullptr;
  }
}

}  // namespace pydist
