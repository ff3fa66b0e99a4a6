#include "bucketing/plan_message.h"

#include "base/error.h"

namespace pydist {

std::string why_invalid(const BucketPlan& plan, std::span<const std::size_t> block_of) {
  std::vector<bool> is_placed(block_of.size(), false);
  for (const std::vector<std::size_t>& bucket : plan) {
    if (bucket.empty()) {
      return "a bucket is empty";
    }
    for (const std::size_t slot : bucket) {
      if (slot >= block_of.size()) {
        return join("parameter ", slot, " does not exist, there are ", block_of.size());
      }
      if (block_of[slot] == kNoBlock) {
        return join("parameter ", slot, " has a sparse gradient, which travels in no bucket");
      }
      if (is_placed[slot]) {
        return join("parameter ", slot, " is there twice");
      }
      is_placed[slot] = true;
      if (block_of[slot] != block_of[bucket.front()]) {
        return join("parameters ", bucket.front(), " and ", slot,
                    " share a bucket, though they differ in dtype or device, or one of them joined "
                    "the model later");
      }
    }
  }
  for (std::size_t slot = 0; slot < block_of.size(); ++slot) {
    if (!is_placed[slot] && block_of[slot] != kNoBlock) {
      return join("parameter ", slot, " is missing");
    }
  }
  return {};
}

// The number of buckets, the size of each, and all slots. No bucket is empty, so there are at most
// as many as slots.
std::size_t encoded_words(std::size_t slots) { return 1 + 2 * slots; }

std::vector<std::int64_t> encode(const BucketPlan& plan, std::size_t slots) {
  std::vector<std::int64_t> words;
  words.reserve(encoded_words(slots));
  words.push_back(static_cast<std::int64_t>(plan.size()));
  for (const std::vector<std::size_t>& bucket : plan) {
    words.push_back(static_cast<std::int64_t>(bucket.size()));
  }
  for (const std::vector<std::size_t>& bucket : plan) {
    words.insert(words.end(), bucket.begin(), bucket.end());
  }
  PYDIST_CHECK(words.size() <= encoded_words(slots));
  words.resize(encoded_words(slots), 0);
  return words;
}

BucketPlan decode(std::span<const std::int64_t> words) {
  const auto buckets = static_cast<std::size_t>(words[0]);
  PYDIST_CHECK(buckets < words.size());
  BucketPlan plan(buckets);
  std::size_t next = 1 + buckets;
  for (std::size_t number = 0; number < buckets; ++number) {
    const auto size = static_cast<std::size_t>(words[1 + number]);
    PYDIST_CHECK(size <= words.size() - next);
    const auto begin = words.begin() + static_cast<std::ptrdiff_t>(next);
    plan[number].assign(begin, begin + static_cast<std::ptrdiff_t>(size));
    next += size;
  }
  return plan;
}

}  // namespace pydist
