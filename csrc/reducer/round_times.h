// When the parts of a backward happened, and what that adds up to.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "reducer/gradients/gradient_arena.h"

namespace pydist {

// Nanoseconds on the clock that all processes of a host share; 0: not yet.
using Instant = std::int64_t;

[[nodiscard]] inline Instant now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct BucketTimes {
  Instant ready = 0;     // all gradients are there
  Instant launched = 0;  // as soon as it and those before it are ready
  // Written by the thread that finishes the operation.
  std::atomic<Instant> done = 0;
};

struct RoundTimes {
  explicit RoundTimes(std::size_t count) : buckets(count) {}

  Instant forward_began = 0;
  Instant forward_ended = 0;
  Instant began = 0;
  Instant computed = 0;  // backward is through
  Instant held = 0;      // backward has returned, and its round is held
  Instant resumed = 0;   // the program has come back to a round that it had held
  Instant ended = 0;     // everything is averaged
  std::deque<BucketTimes> buckets;

  // From then on the training thread does nothing but wait.
  [[nodiscard]] Instant wait_began() const { return std::max(computed, resumed); }
  // How long the training thread launched and waited, after its backward was computed. What it did
  // while the round was held does not count.
  [[nodiscard]] Instant exposed() const {
    return ended - wait_began() + (held != 0 ? held - computed : 0);
  }
};

// What one bucket has cost, as means over the rounds; seconds since the beginning of backward.
struct BucketStats {
  std::string label;
  std::int64_t bytes = 0;
  double ready_s = 0.0;
  double launched_s = 0.0;
  double done_s = 0.0;
};

// What synchronising gradients has cost since the last reset.
struct ReducerStats {
  std::int64_t rounds = 0;
  std::int64_t bytes = 0;
  // Copied from and to gradients that do not lie in their buckets because the program holds them,
  // or gradients of earlier steps.
  std::int64_t copied_bytes = 0;
  double compute_s = 0.0;        // from the beginning to the end of backward
  double communication_s = 0.0;  // at least one bucket was under way
  double exposed_s = 0.0;        // the training thread launched and waited
  // Of the rounds since the plan last changed.
  std::int64_t bucket_rounds = 0;
  std::vector<BucketStats> buckets;
};

// Adds a round that is complete. `launching_s` is what the training thread spent on communication
// before the end of backward.
void add_round(ReducerStats& stats, const GradientArena& arena, const RoundTimes& times,
               double launching_s);

}  // namespace pydist
