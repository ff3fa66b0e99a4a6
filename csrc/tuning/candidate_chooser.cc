#include "tuning/candidate_chooser.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace pydist {
namespace {

// See Note [What trying may cost].
constexpr double kUsesForOneTry = 256;
constexpr std::size_t kUsesForOneTime = 2;
// A candidate replaces the current one where its median is at most this part of the other's, and
// more of the pairs of their times say the same than equal candidates reach by chance: half, and so
// many standard deviations of Mann and Whitney's statistic, whatever the distribution of the times.
constexpr double kBetter = 0.95;
constexpr double kDeviations = 2.4;
// One whose median is at most this part, but not by so many pairs, comes to a runoff with the
// current one, which takes so many times the rounds of a session. It is judged by its own times:
// the best of many in a few noisy rounds is often only the luckiest.
constexpr double kWorthARunoff = 0.9;
constexpr std::size_t kRunoffLength = 2;
// The current way has changed where the median of its last times is so many times another.
constexpr double kOtherState = 1.3;
constexpr std::size_t kTimesSeen = 5;
// From this round on, a candidate is left out whose best time is so many times the best median.
constexpr std::size_t kRoundsBeforeDropping = 3;
constexpr double kHopeless = 1.2;

double median_of(std::vector<double> times) {
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

}  // namespace

CandidateChooser::CandidateChooser(std::size_t count, std::size_t usual, std::uint64_t seed,
                                   const TuningRhythm& rhythm)
    : rhythm_(rhythm),
      session_cost_(static_cast<double>((count - 1) * rhythm.rounds * kUsesForOneTime)),
      random_(seed * 2 + 1),
      current_(usual),
      is_in_(count),
      times_(count),
      medians_(count) {}

CandidateChooser::Plan CandidateChooser::next() {
  pass(1);
  if (phase_ == Phase::kEnding) {
    const std::optional<std::size_t> rival = is_runoff_ ? std::nullopt : undecided_rival();
    if (rival) {
      begin_runoff(*rival);
    } else {
      judge();
      phase_ = Phase::kSteady;
      if (rhythm_.always_tries) {
        begin_session();
      }
    }
  } else if (is_due()) {
    begin_session();
  }
  if (phase_ == Phase::kSession && script_.empty()) {
    plan_round();
  }
  if (phase_ == Phase::kSession) {
    const Plan plan = script_.back();
    script_.pop_back();
    credit_ -= plan.candidate != current_ ? 1 : 0;
    return plan;
  }
  const bool looks = phase_ == Phase::kSteady && uses_since_look_ >= rhythm_.uses_for_one_look;
  if (looks) {
    uses_since_look_ = 0;
  }
  return {current_, looks};
}

std::size_t CandidateChooser::quiet_uses() const noexcept {
  const std::size_t next_look = rhythm_.uses_for_one_look;
  return phase_ == Phase::kSteady && uses_since_look_ + 1 < next_look
             ? next_look - 1 - uses_since_look_
             : 0;
}

bool CandidateChooser::is_due() const noexcept {
  if (phase_ == Phase::kSettling) {
    return uses_ > rhythm_.uses_before_first;
  }
  return phase_ == Phase::kSteady &&
         credit_ >= (has_changed_ ? session_cost_ / 2 : 2 * session_cost_);
}

void CandidateChooser::pass(std::size_t uses) noexcept {
  uses_ += uses;
  uses_since_look_ += uses;
  credit_ = std::min(credit_ + static_cast<double>(uses) / kUsesForOneTry, 2 * session_cost_);
}

void CandidateChooser::charge() noexcept { credit_ = std::max(credit_ - 1, -2 * session_cost_); }

void CandidateChooser::note(std::size_t candidate, double time) {
  if (phase_ == Phase::kSteady) {
    if (candidate == current_) {
      watch(time);
    }
    return;
  }
  if (phase_ == Phase::kSettling) {
    return;
  }
  times_[candidate].push_back(time);
}

void CandidateChooser::begin_session() {
  phase_ = Phase::kSession;
  credit_before_ = credit_;
  round_ = 0;
  is_runoff_ = false;
  has_changed_ = false;
  script_.clear();
  is_in_.assign(is_in_.size(), true);
  for (std::vector<double>& times : times_) {
    times.clear();
  }
}

void CandidateChooser::begin_runoff(std::size_t rival) {
  phase_ = Phase::kSession;
  is_runoff_ = true;
  round_ = 0;
  is_in_.assign(is_in_.size(), false);
  for (const std::size_t candidate : {current_, rival}) {
    is_in_[candidate] = true;
    times_[candidate].clear();
  }
}

void CandidateChooser::plan_round() {
  if (round_ >= kRoundsBeforeDropping && !is_runoff_) {
    drop_hopeless();
  }
  if (round_ == rhythm_.rounds * (is_runoff_ ? kRunoffLength : 1) ||
      std::count(is_in_.begin(), is_in_.end(), true) == 1) {
    phase_ = Phase::kEnding;
    return;
  }
  ++round_;
  std::vector<std::size_t> order;
  for (std::size_t candidate = 0; candidate < is_in_.size(); ++candidate) {
    if (is_in_[candidate]) {
      order.push_back(candidate);
    }
  }
  // A fixed order could keep step with a program that repeats the same few operations.
  for (std::size_t left = order.size(); left > 1; --left) {
    std::swap(order[left - 1], order[draw(left)]);
  }
  for (const std::size_t candidate : order) {
    script_.push_back({candidate, /*is_timed=*/true});
    script_.push_back({candidate, /*is_timed=*/false});
  }
}

void CandidateChooser::drop_hopeless() {
  double best = 0;
  for (const std::vector<double>& times : times_) {
    if (times.size() + 1 >= kRoundsBeforeDropping) {
      const double median = median_of(times);
      best = best == 0 ? median : std::min(best, median);
    }
  }
  for (std::size_t candidate = 0; candidate < times_.size(); ++candidate) {
    const std::vector<double>& times = times_[candidate];
    if (candidate != current_ && best > 0 && !times.empty() &&
        *std::min_element(times.begin(), times.end()) > kHopeless * best) {
      is_in_[candidate] = false;
    }
  }
}

std::optional<std::size_t> CandidateChooser::undecided_rival() const {
  if (times_[current_].empty()) {
    return std::nullopt;
  }
  std::optional<std::size_t> rival;
  double least = kWorthARunoff * median_of(times_[current_]);
  for (std::size_t candidate = 0; candidate < times_.size(); ++candidate) {
    if (candidate == current_ || !is_in_[candidate] || times_[candidate].empty()) {
      continue;
    }
    if (is_better(candidate)) {
      return std::nullopt;
    }
    if (const double median = median_of(times_[candidate]); median <= least) {
      least = median;
      rival = candidate;
    }
  }
  return rival;
}

bool CandidateChooser::is_better(std::size_t candidate) const {
  const std::vector<double>& own = times_[candidate];
  const std::vector<double>& others = times_[current_];
  std::size_t agreeing = 0;
  for (const double time : own) {
    agreeing += static_cast<std::size_t>(
        std::count_if(others.begin(), others.end(), [time](double other) { return time < other; }));
  }
  const auto pairs = static_cast<double>(own.size() * others.size());
  const double deviation =
      std::sqrt(static_cast<double>(own.size() + others.size() + 1) / (12 * pairs));
  return median_of(own) <= kBetter * median_of(others) &&
         static_cast<double>(agreeing) >= std::min(0.5 + kDeviations * deviation, 1.0) * pairs;
}

void CandidateChooser::charge_slow_ones() {
  double known = times_[current_].empty() ? expected_ : median_of(times_[current_]);
  if (known <= 0) {
    // No operation has gone that way; any that was tried could have gone the quickest.
    for (const std::vector<double>& times : times_) {
      if (!times.empty() && (known <= 0 || median_of(times) < known)) {
        known = median_of(times);
      }
    }
  }
  if (known <= 0) {
    return;
  }
  for (std::size_t candidate = 0; candidate < times_.size(); ++candidate) {
    const std::vector<double>& times = times_[candidate];
    if (candidate != current_ && !times.empty()) {
      const double uses = static_cast<double>(times.size() * kUsesForOneTime);
      // The plan has charged each use with one.
      credit_ -= uses * std::max(median_of(times) / known - 2, 0.0);
    }
  }
}

void CandidateChooser::judge() {
  charge_slow_ones();
  ++judged_;
  // Times may be missing: of operations that went another way in the end, or failed. Where most of
  // the current way's are, operations do not go that way, and whichever is known is better.
  const std::size_t least = rhythm_.rounds / 2 + 1;
  const bool goes_current_way = times_[current_].size() >= least;
  std::size_t best = current_;
  for (std::size_t candidate = 0; candidate < times_.size(); ++candidate) {
    const std::vector<double>& times = times_[candidate];
    medians_[candidate] = times.empty() ? std::nullopt : std::optional(median_of(times));
    if (!is_in_[candidate] || times.size() < least || (goes_current_way && !is_better(candidate))) {
      continue;
    }
    const bool knows_best = best != current_ || goes_current_way;
    if (!knows_best || *medians_[candidate] < median_of(times_[best])) {
      best = candidate;
    }
  }
  if (judged_ == 1) {
    credit_ = session_cost_;
  } else if (best != current_) {
    credit_ = credit_before_;
  }
  current_ = best;
  expected_ = medians_[best].value_or(0);
  seen_.clear();
}

void CandidateChooser::watch(double time) {
  seen_.push_back(time);
  if (seen_.size() < kTimesSeen) {
    return;
  }
  if (seen_.size() > kTimesSeen) {
    seen_.erase(seen_.begin());
  }
  const double median = median_of(seen_);
  if (expected_ == 0) {
    expected_ = median;
  }
  has_changed_ = median > kOtherState * expected_ || median * kOtherState < expected_;
}

std::size_t CandidateChooser::draw(std::size_t below) noexcept {
  // xorshift64
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return static_cast<std::size_t>(random_ % below);
}

}  // namespace pydist
