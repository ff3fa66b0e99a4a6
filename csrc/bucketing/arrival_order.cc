#include "bucketing/arrival_order.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

namespace pydist {

ArrivalOrder::ArrivalOrder(std::size_t slots) : order_(slots), missed_in_(slots, 0) {
  std::iota(order_.rbegin(), order_.rend(), std::size_t{0});
}

void ArrivalOrder::add_slot() {
  // What is added to a model stands near its end, as a rule, where backward begins.
  order_.insert(order_.begin(), missed_in_.size());
  missed_in_.push_back(0);
}

void ArrivalOrder::close_round(const std::vector<bool>& is_used_by_all) {
  order_ = expected().order;
  for (std::size_t slot = 0; slot < missed_in_.size(); ++slot) {
    if (!is_used_by_all[slot]) {
      missed_in_[slot] = round_;
    }
  }
  arrived_.clear();
  ++round_;
}

bool ArrivalOrder::is_regular(std::size_t slot) const {
  return missed_in_[slot] == 0 || round_ - missed_in_[slot] > kMemoryRounds;
}

bool ArrivalOrder::wants_plan(const BucketPlan& plan) const {
  if (round_ < next_plan_in_) {
    return false;
  }
  // When each slot was complete; for those that were not, the end of backward.
  std::vector<std::size_t> completed(missed_in_.size(), arrived_.size());
  for (std::size_t position = 0; position < arrived_.size(); ++position) {
    completed[arrived_[position]] = position;
  }
  std::size_t before = 0;
  bool irregular_before = false;
  for (const std::vector<std::size_t>& bucket : plan) {
    std::size_t last = 0;
    std::size_t irregular = 0;
    for (const std::size_t slot : bucket) {
      last = std::max(last, completed[slot]);
      irregular += is_regular(slot) ? 0 : 1;
    }
    if (irregular == bucket.size()) {
      irregular_before = true;
      continue;
    }
    // Gradients that may stay away delay the others of this bucket or of one before it, or this
    // bucket was complete before the last one.
    if (irregular != 0 || irregular_before || last < before) {
      return true;
    }
    before = last;
  }
  return false;
}

void ArrivalOrder::note_plan() { next_plan_in_ = 2 * round_; }

ArrivalOrder::Expected ArrivalOrder::expected() const {
  std::vector<bool> has_arrived(missed_in_.size(), false);
  std::vector<std::size_t> order = arrived_;
  for (const std::size_t slot : arrived_) {
    has_arrived[slot] = true;
  }
  std::copy_if(order_.begin(), order_.end(), std::back_inserter(order),
               [&](std::size_t slot) { return !has_arrived[slot]; });
  const auto rare = std::stable_partition(order.begin(), order.end(),
                                          [this](std::size_t slot) { return is_regular(slot); });
  const auto regular = static_cast<std::size_t>(rare - order.begin());
  return {std::move(order), regular};
}

}  // namespace pydist
