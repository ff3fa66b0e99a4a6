#include "transport/message_ways.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "transport/lane_segment.h"

namespace pydist {
namespace {

constexpr std::array<Choice, 2> kCandidates = {
    Choice{.piece_bytes =
               piece_bytes_of(kMessageLanes.slot_bytes)},  // less in a group of very many ranks
    Choice{.in_place = true},
};
// Places there.
constexpr std::size_t kLane = 0;
constexpr std::size_t kRead = 1;

// Where nothing has been timed.
constexpr bool is_usually_read(TunedMemory memory) noexcept {
  return memory == TunedMemory::kShared;
}

}  // namespace

MessageWays::Class& MessageWays::class_of(const TuningKey& key) {
  const auto found = classes_.find(key);
  if (found != classes_.end()) {
    return found->second;
  }
  const std::optional<Choice> known = table_ != nullptr ? table_->find_near(key) : std::nullopt;
  const bool is_read = known ? known->in_place : is_usually_read(key.memory);
  CandidateChooser chooser(kCandidates.size(), is_read ? kRead : kLane,
                           static_cast<std::uint64_t>(key.size_class), *rhythm_);
  return classes_.emplace(key, Class{std::move(chooser)}).first->second;
}

MessageWays::Way MessageWays::choose(std::size_t bytes, TunedMemory memory, bool do_both_send,
                                     Time now, Came came) {
  Way way;
  const int length = size_class_of(bytes);
  if (length > kLongestClass) {
    return way;
  }
  if (!rhythm_) {
    way.is_read_ = is_usually_read(memory);
    return way;
  }
  const TuningKey key{.kind = OpKind::kRecv,
                      .memory = memory,
                      .ranks = 2,
                      .size_class = length,
                      .sends_too = do_both_send};
  Class& its = class_of(key);
  if (its.is_timing) {
    way.is_next_read_ = its.is_timing_read;
    way.is_read_ = its.is_timing_read && came != Came::kAhead;
    return way;
  }
  const CandidateChooser::Plan plan = its.due ? *its.due : its.chooser.next();
  its.due.reset();
  if (its.chooser.judged() != its.told && table_ != nullptr) {
    its.told = its.chooser.judged();
    std::optional<TuningEntry> entry = found_by(its.chooser, kCandidates);
    // Where no read has succeeded, there was nothing to compare.
    if (entry && entry->times_us.size() == kCandidates.size()) {
      entry->is_learnt = true;
      table_->put(key, *std::move(entry));
    }
  }
  way.is_next_read_ = plan.candidate == kRead;
  if (came == (way.is_next_read_ ? Came::kAhead : Came::kNotAhead)) {
    way.is_read_ = came == Came::kNotAhead && its.chooser.current() == kRead;
    if (way.is_read_ != (its.chooser.current() == kRead)) {
      its.chooser.charge();
    }
    its.due = plan;
    return way;
  }
  way.is_read_ = way.is_next_read_;
  if (plan.is_timed) {
    its.is_timing = true;
    its.is_timing_read = way.is_read_;
    way.timed_ = &its;
    // As for the longest message of the class, so that others of it compare.
    way.scale_ = static_cast<double>(top_of(length)) / static_cast<double>(bytes);
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
