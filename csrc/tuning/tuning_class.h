// What is tuned together, and the ways that it may go.

#pragma once

#include <array>
#include <bit>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/enum_names.h"
#include "base/op_kind.h"

namespace pydist {

// Where the data lies, and what happens to it on the way.
enum class TunedMemory : std::uint8_t {
  kOrdinary,
  kConverted,  // elements travel in a type of their own
  kSymmetric,
  kShared,  // in allocation heaps, which others can read
};

inline constexpr std::array<std::string_view, 4> kTunedMemoryNames = {"ordinary", "converted",
                                                                      "symmetric", "shared"};

[[nodiscard]] constexpr std::string_view to_string(TunedMemory memory) noexcept {
  return name_in(kTunedMemoryNames, memory, "unknown memory");
}

// Collectives that are tuned together, or messages: those are of kind kRecv, and between two ranks.
struct TuningKey {
  OpKind kind = OpKind::kAllReduce;
  TunedMemory memory = TunedMemory::kOrdinary;
  int ranks = 2;
  int size_class = 0;  // see size_class_of()
  // Of a message: its receiver sends to its sender, too. False for all that could come ahead.
  bool sends_too = false;

  auto operator<=>(const TuningKey&) const = default;
};

// One way to move their data.
struct Choice {
  // Of what a rank moves through transit in a round, or of a long message in one piece; 0 where
  // nothing goes in pieces: in one shot, on the symmetric heap, or in place.
  std::uint32_t piece_bytes = 0;
  // Whether results are stored past the caches (StoreHint::kStreaming).
  bool streams = false;
  // Whether ranks read each other's memory: shared memory where it lies, ordinary memory through
  // the kernel.
  bool in_place = false;

  bool operator==(const Choice&) const = default;
};

// The largest class that a word may name: more bytes than any buffer has.
inline constexpr int kLargestSizeClass = 48;

// c, where 2^(c-1) < bytes <= 2^c. `bytes`: what a rank contributes or sends, as it
// travels; more than 0.
[[nodiscard]] constexpr int size_class_of(std::size_t bytes) noexcept {
  return static_cast<int>(std::bit_width(bytes - 1));
}
[[nodiscard]] constexpr std::size_t top_of(int size_class) noexcept {
  return std::size_t{1} << size_class;
}

}  // namespace pydist
