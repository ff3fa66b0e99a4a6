// What the tuner may choose from, for each class of collectives.

#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "base/enum_names.h"
#include "base/op_kind.h"

namespace pydist {

// Where the data of a collective lies, and what happens to it on the way.
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

// Collectives that are tuned together.
struct TuningKey {
  OpKind kind = OpKind::kAllReduce;
  TunedMemory memory = TunedMemory::kOrdinary;
  int ranks = 2;
  int size_class = 0;  // see size_class_of()

  auto operator<=>(const TuningKey&) const = default;
};

// One way to move their data.
struct Choice {
  // Of what a rank moves through transit in a round; 0 where nothing goes in pieces: in one shot,
  // on the symmetric heap, or in place.
  std::uint32_t piece_bytes = 0;
  // Whether results are stored past the caches (StoreHint::kStreaming).
  bool streams = false;
  // Whether ranks read each other's memory: shared memory where it lies, ordinary memory through
  // the kernel.
  bool in_place = false;

  bool operator==(const Choice&) const = default;
};

// What the user has said, PYDIST_CHUNK_BYTES and PYDIST_ONE_SHOT_BYTES, and what the system allows.
struct TuningLimits {
  std::size_t chunk_bytes = 0;
  bool pins_piece = false;
  std::optional<std::size_t> one_shot_bytes;
  bool reads_processes = false;
};

// The largest class that a word may name: more bytes than any buffer has.
inline constexpr int kLargestSizeClass = 48;

// c, where 2^(c-1) < bytes <= 2^c. `bytes`: what a rank contributes, as it travels; more than 0.
[[nodiscard]] int size_class_of(std::size_t bytes) noexcept;
[[nodiscard]] constexpr std::size_t top_of(int size_class) noexcept {
  return std::size_t{1} << size_class;
}

// The first is what is taken without a tuner; it is the only one where there is nothing to choose.
[[nodiscard]] std::vector<Choice> candidates_for(const TuningKey& key, const TuningLimits& limits);

// Whether a rank may announce pieces of so many bytes.
[[nodiscard]] bool is_a_piece(std::size_t bytes, std::size_t chunk_bytes, int ranks) noexcept;

}  // namespace pydist
