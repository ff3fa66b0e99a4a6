// A shuffled order of 0 .. length-1 that is computed place by place: what stands at a place follows
// from (length, seed, epoch) alone, on every platform, and costs the same wherever the place is.
//
// Up to kTableLength elements the order is a Fisher-Yates shuffle, kept as a table of 8 KiB: all
// orders are equally likely, down to two elements. Beyond, it is a Feistel network on pairs (left,
// right) of a grid of about sqrt(length) x sqrt(length) places, with a walk along the cycle from
// those that lie beyond the end: a generalized-Feistel cipher (Black and Rogaway 2002, "Ciphers
// with Arbitrary Finite Domains"). The grid has less than sqrt(length) places too many, so a walk
// is rare. It keeps no secrets: it must look random to training, not to an attacker.
//
// Orders are part of what checkpoints rely on: a change here moves every seed's order, so the first
// values are pinned by tests.
//
// Immutable, hence safe from any thread.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace pydist {

class KeyedPermutation {
 public:
  static constexpr std::uint64_t kTableLength = 4096;
  static constexpr std::uint64_t kMaxLength = (std::uint64_t{1} << 63U) - 1;

  // Throws InvalidUsage for a length of 0, or above kMaxLength.
  KeyedPermutation(std::uint64_t length, std::uint64_t seed, std::uint64_t epoch);

  [[nodiscard]] std::uint64_t length() const noexcept { return length_; }

  // What stands at `place`, which is less than length().
  [[nodiscard]] std::uint64_t at(std::uint64_t place) const noexcept;

  // What stands at first, first + step, ...: as many as `out` holds, all of them below length().
  // Throws InvalidUsage where they are not.
  void fill(std::uint64_t first, std::uint64_t step, std::span<std::int64_t> out) const;

 private:
  // Four on each half. What neighbours, positions, seeds and epochs have to do with each other is
  // lost in the noise of the tests after six.
  static constexpr std::size_t kRounds = 8;

  struct RoundKey {
    std::uint64_t addend;
    std::uint64_t factor;
  };

  template <std::size_t kPlaces>
  void mix(std::array<std::uint64_t, kPlaces>& left,
           std::array<std::uint64_t, kPlaces>& right) const noexcept;
  [[nodiscard]] std::uint64_t mix_one(std::uint64_t place) const noexcept;
  [[nodiscard]] std::uint64_t walk(std::uint64_t place) const noexcept;

  std::uint64_t length_;
  // Of the grid; unused where there is a table.
  std::uint64_t columns_ = 1;
  std::uint64_t rows_ = 1;
  std::array<RoundKey, kRounds> keys_{};
  std::vector<std::uint16_t> table_;
};

}  // namespace pydist
