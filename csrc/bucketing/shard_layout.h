// How a bucket is divided among the ranks that update it; the same on every rank.
//
// The slots of a bucket lie one behind the other, each from a multiple of kShardAlignmentBytes on.
// The bucket is padded, then cut into equal *shards*, one for each rank, in rank order, whose ends
// are such multiples as well. So a shard cuts through the middle of parameters, whatever their
// sizes: what a shard has of a slot is a *segment*.
//
// Note [Where shards are cut]: vector code treats the last elements of a run in another way than
// the rest, and compilers may round the two differently (a fused multiply-add here, none there).
// Segments that begin at multiples of two of the widest vectors, counted from the beginning of
// their slot, end in such a tail only where the slot itself does. So an element-wise optimizer
// computes the same bits on segments as on whole parameters.

#pragma once

#include <cstddef>
#include <vector>

#include "bucketing/plan_message.h"

namespace pydist {

// Two vectors of 512 bits.
inline constexpr std::size_t kShardAlignmentBytes = 128;

// A run of elements of one slot that lies in one shard.
struct ShardSegment {
  std::size_t slot = 0;    // which of the bucket's
  std::size_t begin = 0;   // in the slot
  std::size_t count = 0;   // not 0
  std::size_t offset = 0;  // in the shard
  friend bool operator==(const ShardSegment&, const ShardSegment&) = default;
};

class ShardLayout {
 public:
  ShardLayout() = default;
  // For slots of so many elements each, some of them perhaps 0.
  ShardLayout(std::vector<std::size_t> counts, std::size_t element_bytes, int ranks);

  // Elements of the bucket, with padding: `shard()` for each rank.
  [[nodiscard]] std::size_t count() const noexcept { return shard_ * ranks_; }
  [[nodiscard]] std::size_t shard() const noexcept { return shard_; }
  // Where each slot begins in the bucket.
  [[nodiscard]] const std::vector<std::size_t>& offsets() const noexcept { return offsets_; }
  // What the shard of `rank` has, in the order of the slots: at most one segment of each.
  [[nodiscard]] std::vector<ShardSegment> segments(int rank) const;

 private:
  std::vector<std::size_t> counts_;
  std::vector<std::size_t> offsets_;
  std::size_t ranks_ = 1;
  std::size_t shard_ = 0;
};

// A plan in which the buckets of `fixed` stay together as they are, in the order in which `wished`
// completes them, and whatever slots are in none of them travel as `wished` has them.
[[nodiscard]] BucketPlan with_fixed_buckets(const BucketPlan& wished, const BucketPlan& fixed);

}  // namespace pydist
