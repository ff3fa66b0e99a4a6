#include "bucketing/shard_layout.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/error.h"

namespace pydist {
namespace {

std::size_t round_up_to(std::size_t count, std::size_t multiple) {
  return (count + multiple - 1) / multiple * multiple;
}

}  // namespace

ShardLayout::ShardLayout(std::vector<std::size_t> counts, std::size_t element_bytes, int ranks)
    : counts_(std::move(counts)), ranks_(static_cast<std::size_t>(ranks)) {
  PYDIST_CHECK(element_bytes != 0 && kShardAlignmentBytes % element_bytes == 0 && ranks > 0);
  const std::size_t alignment = kShardAlignmentBytes / element_bytes;
  std::size_t end = 0;
  for (const std::size_t count : counts_) {
    offsets_.push_back(end);
    end += round_up_to(count, alignment);
  }
  shard_ = round_up_to((end + ranks_ - 1) / ranks_, alignment);
}

std::vector<ShardSegment> ShardLayout::segments(int rank) const {
  const std::size_t shard_begin = static_cast<std::size_t>(rank) * shard_;
  const std::size_t shard_end = shard_begin + shard_;
  std::vector<ShardSegment> segments;
  for (std::size_t slot = 0; slot < counts_.size(); ++slot) {
    const std::size_t begin = std::max(offsets_[slot], shard_begin);
    const std::size_t end = std::min(offsets_[slot] + counts_[slot], shard_end);
    if (begin < end) {
      segments.push_back({slot, begin - offsets_[slot], end - begin, begin - shard_begin});
    }
  }
  return segments;
}

BucketPlan with_fixed_buckets(const BucketPlan& wished, const BucketPlan& fixed) {
  constexpr std::size_t kNone = static_cast<std::size_t>(-1);
  std::map<std::size_t, std::size_t> fixed_of;  // slot to bucket
  for (std::size_t bucket = 0; bucket < fixed.size(); ++bucket) {
    for (const std::size_t slot : fixed[bucket]) {
      fixed_of[slot] = bucket;
    }
  }
  // A bucket is complete with its last slot.
  std::vector<std::size_t> missing;
  for (const std::vector<std::size_t>& bucket : fixed) {
    missing.push_back(bucket.size());
  }
  BucketPlan plan;
  for (const std::vector<std::size_t>& bucket : wished) {
    std::vector<std::size_t> others;
    for (const std::size_t slot : bucket) {
      const auto found = fixed_of.find(slot);
      const std::size_t number = found == fixed_of.end() ? kNone : found->second;
      if (number == kNone) {
        others.push_back(slot);
      } else if (--missing[number] == 0) {
        plan.push_back(fixed[number]);
      }
    }
    if (!others.empty()) {
      plan.push_back(std::move(others));
    }
  }
  return plan;
}

}  // namespace pydist
