#include "transport/message_ways.h"

#include <bit>
#include <chrono>
#include <cstdint>

namespace pydist {
namespace {

// Candidates of a chooser.
constexpr std::size_t kLane = 0;
constexpr std::size_t kRead = 1;
// Up to 2 MiB a message finds in the caches what the one before it has left there; see
// CandidateChooser.
constexpr int kLongestWarmedClass = 21;

}  // namespace

MessageWays::Way MessageWays::choose(std::size_t bytes, bool do_both_send, bool is_alone) {
  Way way;
  const int length = std::bit_width(bytes - 1);
  if (length > kLongestClass) {
    return way;
  }
  way.is_read_ = usually_reads_;
  if (!rhythm_) {
    return way;
  }
  CandidateChooser& chooser =
      choosers_
          .try_emplace({do_both_send, length}, /*count=*/2, usually_reads_ ? kRead : kLane,
                       /*warms_up=*/length <= kLongestWarmedClass,
                       /*seed=*/static_cast<std::uint64_t>(length), *rhythm_)
          .first->second;
  if (!is_alone) {
    way.is_read_ = chooser.current() == kRead;
    return way;
  }
  const CandidateChooser::Plan plan = chooser.next();
  way.is_read_ = plan.candidate == kRead;
  if (plan.is_timed) {
    way.chooser_ = &chooser;
    way.begin_ = Deadline::Clock::now();
  }
  return way;
}

void MessageWays::note(const Way& way) {
  if (way.chooser_ != nullptr) {
    const std::chrono::duration<double, std::micro> took = Deadline::Clock::now() - way.begin_;
    way.chooser_->note(way.is_read_ ? kRead : kLane, took.count());
  }
}

}  // namespace pydist
