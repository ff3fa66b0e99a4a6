// FNV-1a, a word at a time: the same on every rank, whatever the standard library hashes with.
//
// For telling apart what ranks should have in common; it keeps no secrets.

#pragma once

#include <cstdint>
#include <string_view>

namespace pydist {

class Digest {
 public:
  void add(std::uint64_t word) noexcept { value_ = (value_ ^ word) * 1099511628211ULL; }
  void add(std::string_view text) noexcept {
    for (const char letter : text) {
      add(static_cast<std::uint64_t>(static_cast<unsigned char>(letter)));
    }
  }

  [[nodiscard]] std::uint64_t value() const noexcept { return value_; }

 private:
  std::uint64_t value_ = 14695981039346656037ULL;
};

}  // namespace pydist
