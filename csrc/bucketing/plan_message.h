// Which gradients travel together, and in which order; the same on every rank.
//
// Gradients are known by their slot: the index of their parameter in the order of registration.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace pydist {

// The buckets in the order of launching, each with its slots in the order in which they lie there.
using BucketPlan = std::vector<std::vector<std::size_t>>;

// The number that stands for no block of memory: a slot with a sparse gradient has none.
inline constexpr std::size_t kNoBlock = static_cast<std::size_t>(-1);

// Why a plan does not fit slots that lie in the given blocks of memory; empty if it fits. Every
// slot with a block must be in exactly one bucket, a slot without one in none, and all slots of a
// bucket must share a block.
[[nodiscard]] std::string why_invalid(const BucketPlan& plan,
                                      std::span<const std::size_t> block_of);

// A plan as a message, whose length depends on the number of slots alone.
[[nodiscard]] std::size_t encoded_words(std::size_t slots);
[[nodiscard]] std::vector<std::int64_t> encode(const BucketPlan& plan, std::size_t slots);
[[nodiscard]] BucketPlan decode(std::span<const std::int64_t> words);

}  // namespace pydist
