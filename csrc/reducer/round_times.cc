#include "reducer/round_times.h"

#include <algorithm>

namespace pydist {
namespace {

double seconds(Instant duration) { return static_cast<double>(duration) * 1e-9; }
double seconds(Instant from, Instant to) { return seconds(to - from); }

// Folds a value into the mean of `count` values, itself included.
void fold(double& mean, double value, std::int64_t count) {
  mean += (value - mean) / static_cast<double>(count);
}

}  // namespace

void add_round(ReducerStats& stats, const GradientArena& arena, const RoundTimes& times,
               double launching_s) {
  ++stats.rounds;
  ++stats.bucket_rounds;
  stats.compute_s += seconds(times.began, times.computed) - launching_s;
  stats.exposed_s += seconds(times.exposed()) + launching_s;
  stats.buckets.resize(arena.buckets().size());
  // Launched in order, and most often done in it: the union of the intervals in one pass.
  Instant busy_until = times.began;
  for (std::size_t number = 0; number < stats.buckets.size(); ++number) {
    const BucketTimes& bucket = times.buckets[number];
    BucketStats& mean = stats.buckets[number];
    // The last callbacks may run a moment after the wait has ended.
    const Instant done = bucket.done != 0 ? bucket.done.load() : times.ended;
    const Instant ready = bucket.ready != 0 ? bucket.ready : times.computed;
    mean.label = arena.buckets()[number].label;
    mean.bytes = static_cast<std::int64_t>(arena.buckets()[number].memory.nbytes());
    fold(mean.ready_s, seconds(times.began, ready), stats.bucket_rounds);
    fold(mean.launched_s, seconds(times.began, bucket.launched), stats.bucket_rounds);
    fold(mean.done_s, seconds(times.began, done), stats.bucket_rounds);
    stats.bytes += mean.bytes;
    const Instant from = std::max(busy_until, bucket.launched);
    stats.communication_s += done > from ? seconds(from, done) : 0.0;
    busy_until = std::max(busy_until, done);
  }
}

}  // namespace pydist
