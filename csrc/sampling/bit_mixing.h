// Mixing of 64-bit words: the arithmetic under the keyed permutation and the multiset digest.

#pragma once

#include <cstdint>

namespace pydist {

__extension__ using Uint128 = unsigned __int128;

// A bijection after which each bit depends on all bits of `word` (the finalizer of SplitMix64;
// Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom Number Generators").
[[nodiscard]] constexpr std::uint64_t mix_bits(std::uint64_t word) noexcept {
  word = (word ^ (word >> 30U)) * 0xBF58476D1CE4E5B9ULL;
  word = (word ^ (word >> 27U)) * 0x94D049BB133111EBULL;
  return word ^ (word >> 31U);
}

// The generator that goes with it: words that differ wherever the state it starts from does.
class SplitMix64 {
 public:
  explicit constexpr SplitMix64(std::uint64_t state) noexcept : state_(state) {}

  constexpr std::uint64_t next() noexcept {
    state_ += 0x9E3779B97F4A7C15ULL;
    return mix_bits(state_);
  }

 private:
  std::uint64_t state_;
};

// word * bound / 2^64: a word that is uniform over 64 bits becomes one over 0 .. bound-1, as evenly
// as 2^64 values can be dealt out.
[[nodiscard]] constexpr std::uint64_t scale_down(std::uint64_t word, std::uint64_t bound) noexcept {
  return static_cast<std::uint64_t>((Uint128{word} * bound) >> 64U);
}

}  // namespace pydist
