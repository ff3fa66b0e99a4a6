// How a buffer is divided among ranks: pure arithmetic.

#pragma once

#include <algorithm>
#include <cstddef>

namespace pydist {

// Of a cache.
inline constexpr std::size_t kLineBytes = 64;

// A run of elements of a buffer.
struct Slice {
  std::size_t begin = 0;
  std::size_t count = 0;
};

// Divides `count` elements into one slice a rank: in order, without gaps, as equal as whole cache
// lines allow, so that no two ranks write to one line. Slices at the end may be empty.
class Slices {
 public:
  Slices(std::size_t count, int size, std::size_t element_bytes) noexcept : count_(count) {
    const std::size_t line = std::max<std::size_t>(1, kLineBytes / element_bytes);
    const auto parts = static_cast<std::size_t>(size);
    const std::size_t lines = (count + line - 1) / line;
    per_rank_ = (lines + parts - 1) / parts * line;
  }

  [[nodiscard]] std::size_t count() const noexcept { return count_; }

  [[nodiscard]] Slice operator[](int rank) const noexcept {
    const std::size_t begin = std::min(count_, static_cast<std::size_t>(rank) * per_rank_);
    return {begin, std::min(per_rank_, count_ - begin)};
  }

 private:
  std::size_t count_;
  std::size_t per_rank_;
};

}  // namespace pydist
