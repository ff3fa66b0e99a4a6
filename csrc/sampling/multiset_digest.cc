#include "sampling/multiset_digest.h"

#include "sampling/bit_mixing.h"

namespace pydist {

void MultisetDigest::add(std::span<const std::int64_t> indices) noexcept {
  Uint128 sum = (Uint128{high} << 64U) | low;
  for (const std::int64_t index : indices) {
    // The halves must not follow from each other: what cancels in one would cancel in the other.
    const auto word = static_cast<std::uint64_t>(index);
    const std::uint64_t upper = mix_bits(mix_bits(word + 0x9E3779B97F4A7C15ULL) + word);
    const std::uint64_t lower = mix_bits(mix_bits(word ^ 0xC2B2AE3D27D4EB4FULL) ^ (word << 1U));
    sum += (Uint128{upper} << 64U) | lower;
  }
  high = static_cast<std::uint64_t>(sum >> 64U);
  low = static_cast<std::uint64_t>(sum);
}

}  // namespace pydist
