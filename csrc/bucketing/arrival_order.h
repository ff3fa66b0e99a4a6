// Learns in which order backward completes gradients, and tells when a plan should follow it.
//
// Buckets are launched in the order of the plan, so one that is complete waits for those before it.
// Where that happens, or where a parameter that not every rank uses holds up the bucket that it is
// in until the end of backward, a plan made from the order that was seen is better.
//
// Plans are made ever more rarely: after rounds 1, 2, 4, 8, ... since the first. So a model whose
// order changes all the time costs next to nothing, and one that settles is followed soon.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bucketing/plan_message.h"

namespace pydist {

class ArrivalOrder {
 public:
  // Before anything was seen, the reverse of registration is expected.
  explicit ArrivalOrder(std::size_t slots);

  void add_slot();

  // A gradient is complete, for the first time in this round.
  void note(std::size_t slot) { arrived_.push_back(slot); }

  // Ends a round. `is_used_by_all`, by slot, is the same on every rank.
  void close_round(const std::vector<bool>& is_used_by_all);

  // Starts a round anew whose gradients are worth nothing.
  void drop_round() { arrived_.clear(); }

  // Whether to make a plan now, in the middle of a round in which everything has arrived.
  [[nodiscard]] bool wants_plan(const BucketPlan& plan) const;

  // A plan was made, or would have been the same.
  void note_plan();

  // All slots, in the order in which this round and those before it have completed them. Those of
  // parameters that are unused on some rank come last.
  struct Expected {
    std::vector<std::size_t> order;
    std::size_t regular = 0;  // how many of them every rank uses
  };
  [[nodiscard]] Expected expected() const;

 private:
  // For so many rounds after it was unused on some rank, a parameter counts as one that may be
  // unused again.
  static constexpr std::uint64_t kMemoryRounds = 64;

  [[nodiscard]] bool is_regular(std::size_t slot) const;

  std::vector<std::size_t> order_;    // of all slots, as last seen
  std::vector<std::size_t> arrived_;  // in this round
  // The round, from 1, in which the parameter was last unused on some rank; 0 for never.
  std::vector<std::uint64_t> missed_in_;
  std::uint64_t round_ = 1;
  std::uint64_t next_plan_in_ = 1;
};

}  // namespace pydist
