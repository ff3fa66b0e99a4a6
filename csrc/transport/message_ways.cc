#include "transport/message_ways.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace pydist {
namespace {

// Places among the candidates.
constexpr std::size_t kLane = 0;
constexpr std::size_t kRead = 1;

}  // namespace

MessageWays::Class& MessageWays::class_of(const TuningKey& key) {
  const auto found = classes_.find(key);
  if (found != classes_.end()) {
    return found->second;
  }
  const std::optional<Choice> known = table_ != nullptr ? table_->find_near(key) : std::nullopt;
  const bool is_read = known ? known->in_place : key.memory == TunedMemory::kShared;
  CandidateChooser chooser(candidates_.size(), is_read ? kRead : kLane,
                           static_cast<std::uint64_t>(key.size_class), *rhythm_);
  return classes_.emplace(key, Class{std::move(chooser)}).first->second;
}

MessageWays::Way MessageWays::choose(std::size_t bytes, TunedMemory memory, bool do_both_send,
                                     Time now) {
  Way way;
  const int length = size_class_of(bytes);
  if (!rhythm_ || length > kLongestClass) {
    return way;
  }
  const TuningKey key{.kind = OpKind::kRecv,
                      .memory = memory,
                      .ranks = 2,
                      .size_class = length,
                      .sends_too = do_both_send};
  Class& its = class_of(key);
  if (its.is_timing) {
    way.is_read_ = its.is_timing_read;
    return way;
  }
  const CandidateChooser::Plan plan = its.chooser.next();
  if (its.chooser.judged() != its.told && table_ != nullptr) {
    its.told = its.chooser.judged();
    if (std::optional<TuningEntry> entry = found_by(its.chooser, candidates_)) {
      entry->is_learnt = true;
      table_->put(key, *std::move(entry));
    }
  }
  way.is_read_ = plan.candidate == kRead;
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
