#include "sampling/keyed_permutation.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "sampling/bit_mixing.h"

namespace pydist {
namespace {

// The seed and the epoch are mixed apart: (seed 0, epoch 1) has nothing to do with (1, 0).
SplitMix64 words_of(std::uint64_t length, std::uint64_t seed, std::uint64_t epoch) noexcept {
  std::uint64_t state = mix_bits(seed + 0x9E3779B97F4A7C15ULL);
  state = mix_bits(state ^ mix_bits(epoch + 0xD1B54A32D192ED03ULL));
  return SplitMix64(mix_bits(state ^ mix_bits(length + 0x8CB92BA72F3D8DD7ULL)));
}

// Uniform over 0 .. bound-1 without any bias (Lemire 2019, "Fast Random Integer Generation in an
// Interval").
std::uint64_t below(std::uint64_t bound, SplitMix64& words) noexcept {
  const std::uint64_t threshold = (0 - bound) % bound;
  while (true) {
    const Uint128 product = Uint128{words.next()} * bound;
    if (static_cast<std::uint64_t>(product) >= threshold) {
      return static_cast<std::uint64_t>(product >> 64U);
    }
  }
}

// The least number whose square is at least `value`.
std::uint64_t square_root_rounded_up(std::uint64_t value) noexcept {
  auto root = static_cast<std::uint64_t>(std::sqrt(static_cast<double>(value)));
  while (Uint128{root} * root < value) {
    ++root;
  }
  while (Uint128{root - 1} * (root - 1) >= value) {
    --root;
  }
  return root;
}

// Enough of them to keep the multipliers busy, few enough for the registers.
constexpr std::size_t kPlacesAtOnce = 8;

}  // namespace

KeyedPermutation::KeyedPermutation(std::uint64_t length, std::uint64_t seed, std::uint64_t epoch)
    : length_(length) {
  if (length == 0 || length > kMaxLength) {
    throw InvalidUsage(
        join("A permutation is of 1 to 2^63 - 1 elements, and can't be of ", length, "."));
  }
  SplitMix64 words = words_of(length, seed, epoch);
  if (length <= kTableLength) {
    table_.resize(length);
    std::iota(table_.begin(), table_.end(), std::uint16_t{0});
    for (std::uint64_t last = length - 1; last > 0; --last) {
      std::swap(table_[last], table_[below(last + 1, words)]);
    }
    return;
  }
  columns_ = square_root_rounded_up(length);
  rows_ = (length + columns_ - 1) / columns_;
  for (RoundKey& key : keys_) {
    key.addend = words.next();
    key.factor = words.next() | 1U;
  }
}

// Sends each (left, right) to another place of the grid. Each round adds to one half a number that
// depends on the other one. Of several places at once, since each waits for its own
// multiplications.
template <std::size_t kPlaces>
void KeyedPermutation::mix(std::array<std::uint64_t, kPlaces>& left,
                           std::array<std::uint64_t, kPlaces>& right) const noexcept {
  const auto add = [](std::array<std::uint64_t, kPlaces>& half, std::uint64_t size,
                      const std::array<std::uint64_t, kPlaces>& other, const RoundKey& key) {
    for (std::size_t i = 0; i < kPlaces; ++i) {
      std::uint64_t word = (other[i] + key.addend) * key.factor;
      word = (word ^ (word >> 32U)) * 0xD6E8FEB86659FD93ULL;
      const std::uint64_t sum = half[i] + scale_down(word, size);
      half[i] = sum >= size ? sum - size : sum;
    }
  };
  for (std::size_t round = 0; round < kRounds; round += 2) {
    add(left, columns_, right, keys_[round]);
    add(right, rows_, left, keys_[round + 1]);
  }
}

// The grid has more places than there are samples: a place beyond the end is permuted again, until
// it lies before the end.
std::uint64_t KeyedPermutation::walk(std::uint64_t place) const noexcept {
  while (place >= length_) {
    place = mix_one(place);
  }
  return place;
}

std::uint64_t KeyedPermutation::mix_one(std::uint64_t place) const noexcept {
  std::array<std::uint64_t, 1> left{place % columns_};
  std::array<std::uint64_t, 1> right{place / columns_};
  mix(left, right);
  return left[0] + columns_ * right[0];
}

std::uint64_t KeyedPermutation::at(std::uint64_t place) const noexcept {
  return table_.empty() ? walk(mix_one(place)) : table_[place];
}

void KeyedPermutation::fill(std::uint64_t first, std::uint64_t step,
                            std::span<std::int64_t> out) const {
  if (out.empty()) {
    return;
  }
  if (first >= length_ || Uint128{first} + Uint128{step} * (out.size() - 1) >= length_) {
    throw InvalidUsage(join("The places ", first, ", ", first, " + ", step, ", ... (", out.size(),
                            " of them) go beyond the end of a permutation of ", length_,
                            " elements."));
  }
  if (!table_.empty()) {
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = table_[first + i * step];
    }
    return;
  }
  // Divisions cost as much as several rounds, so the halves of a place are carried along. They
  // leave the grid only behind the last place that is asked for.
  std::uint64_t next_left = first % columns_;
  std::uint64_t next_right = first / columns_;
  const std::uint64_t left_step = step % columns_;
  const std::uint64_t right_step = step / columns_;
  std::array<std::uint64_t, kPlacesAtOnce> left{};
  std::array<std::uint64_t, kPlacesAtOnce> right{};
  for (std::size_t done = 0; done < out.size(); done += kPlacesAtOnce) {
    for (std::size_t i = 0; i < kPlacesAtOnce; ++i) {
      left[i] = next_left;
      right[i] = next_right;
      next_left += left_step;
      const std::uint64_t carry = next_left >= columns_ ? 1 : 0;
      next_left -= carry * columns_;
      next_right += right_step + carry;
    }
    mix(left, right);
    const std::span<std::int64_t> part =
        out.subspan(done, std::min(kPlacesAtOnce, out.size() - done));
    for (std::size_t i = 0; i < part.size(); ++i) {
      part[i] = static_cast<std::int64_t>(walk(left[i] + columns_ * right[i]));
    }
  }
}

}  // namespace pydist
