// A 128-bit digest of a multiset of indices: the same in whatever order and in however many parts
// they are added, another one where an index is missing or there once more.
//
// The sum modulo 2^128 of a hash of each index. Made against mistakes, not against adversaries: two
// different multisets that were not constructed for it agree with a chance of about 2^-128.

#pragma once

#include <cstdint>
#include <span>

namespace pydist {

struct MultisetDigest {
  std::uint64_t high = 0;
  std::uint64_t low = 0;

  void add(std::span<const std::int64_t> indices) noexcept;
};

}  // namespace pydist
