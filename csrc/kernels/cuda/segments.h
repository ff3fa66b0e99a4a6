// Many buffers in one launch: a table of them rides along as the kernel's argument.
//
// Segments are cut into tiles, which the blocks share; a tile belongs to one segment. What does not
// fit into one table goes into the next launch. In a full tile whose buffers are aligned to groups
// a thread takes kTileGroups groups of kGroup elements, one behind the other of its neighbour's;
// otherwise it takes elements one by one.

#pragma once

#include <cstdint>
#include <type_traits>

#include "base/dtype.h"
#include "kernels/cuda/elements.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/memory.h"

namespace pydist::cuda {

constexpr unsigned kGroup = 4;
constexpr unsigned kTileGroups = 4;
constexpr unsigned kTileElements = kBlockThreads * kTileGroups * kGroup;

// Bytes that every device takes as a kernel's argument.
constexpr unsigned kArgumentBytes = 4096;

// `Segment` has count and first_tile. `Shared` is what the whole launch has in common.
template <typename Segment, typename Shared>
struct SegmentTable {
  static constexpr unsigned kCapacity =
      (kArgumentBytes - sizeof(Shared) - 2 * sizeof(std::uint64_t)) / sizeof(Segment);

  Segment segments[kCapacity];
  Shared shared;
  std::uint32_t segment_count;
  std::uint32_t tiles;

  // The segment of a tile: the last that begins at it or before, so never an empty one.
  PYDIST_DEVICE std::uint32_t segment_of(std::uint32_t tile) const {
    std::uint32_t low = 0;
    std::uint32_t high = segment_count;
    while (high - low > 1) {
      const std::uint32_t middle = (low + high) / 2;
      if (segments[middle].first_tile <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

// Calls launch(table) for tables that together hold all segments. `enter` makes an entry, but for
// first_tile, of a descriptor's segment. Stops at the first error.
template <typename Table, typename Given, typename Enter, typename Launch>
int for_each_table(const Given* given, std::uint64_t count, Table& table, Enter enter,
                   Launch launch) {
  static_assert(sizeof(Table) <= kArgumentBytes && Table::kCapacity >= 32, "a table too large");
  // Far from what 32 bits hold, so that a kernel's loop over tiles cannot wrap around.
  constexpr std::uint64_t kMostTiles = std::uint64_t{1} << 30;
  std::uint64_t tiles = 0;
  table.segment_count = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    auto entry = enter(given[i]);
    const std::uint64_t more = (entry.count + kTileElements - 1) / kTileElements;
    if (table.segment_count == Table::kCapacity || tiles + more > kMostTiles) {
      table.tiles = static_cast<std::uint32_t>(tiles);
      if (tiles > 0) {
        if (const int error = launch(table); error != 0) {
          return error;
        }
      }
      tiles = 0;
      table.segment_count = 0;
    }
    entry.first_tile = static_cast<std::uint32_t>(tiles);
    table.segments[table.segment_count++] = entry;
    tiles += more;
  }
  table.tiles = static_cast<std::uint32_t>(tiles);
  return tiles > 0 ? launch(table) : 0;
}

// ---- groups of elements -------------------------------------------------------------------

// Whether groups in a tile of `buffer` can be loaded at once; tiles begin at multiples of groups.
PYDIST_DEVICE bool is_group_aligned(const void* buffer, unsigned element_bytes) {
  const unsigned bytes = element_bytes == 8 ? 16 : element_bytes * kGroup;
  return bits_as<std::uint64_t>(buffer) % bytes == 0;
}

// Bytes of a dtype that values() below knows.
PYDIST_DEVICE unsigned float_bytes(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// Two groups' worth of bytes where an element has eight.
struct RawGroup {
  Words words[2];
};

// kWidth is kGroup, or 1 for single elements.
template <int kWidth>
PYDIST_DEVICE RawGroup load_group(const void* base, std::uint64_t element, unsigned bytes) {
  const unsigned char* const from = at(base, element * bytes);
  RawGroup raw;
  if constexpr (kWidth == 1) {
    if (bytes == 8) {
      raw.words[0] = load_8(from);
    } else {
      raw.words[0].word[0] = bytes == 4 ? load_4(from) : load_2(from);
    }
  } else if (bytes == 8) {
    raw.words[0] = load_16(from);
    raw.words[1] = load_16(from + 16);
  } else {
    raw.words[0] = bytes == 4 ? load_16(from) : load_8(from);
  }
  return raw;
}

// Not for float64 where Value is float.
template <int kWidth, typename Value>
PYDIST_DEVICE void widen_group(DType dtype, const RawGroup& raw, Value (&values)[kWidth]) {
  PYDIST_UNROLL
  for (int v = 0; v < kWidth; ++v) {
    if (std::is_same_v<Value, double> && dtype == DType::kFloat64) {
      const Words& words = raw.words[v / 2];
      values[v] = static_cast<Value>(
          bits_as<double>(std::uint64_t{words.word[v % 2 * 2 + 1]} << 32 | words.word[v % 2 * 2]));
    } else if (dtype == DType::kFloat32) {
      values[v] = bits_as<float>(raw.words[0].word[v]);
    } else {
      const std::uint32_t word = raw.words[0].word[v / 2];
      const std::uint32_t half = v % 2 == 0 ? word & 0xffffu : word >> 16;
      values[v] = dtype == DType::kFloat16 ? widen_float16(half) : widen_bfloat16(half);
    }
  }
}

PYDIST_DEVICE float to_float32(float value) { return value; }
PYDIST_DEVICE float to_float32(double value) { return static_cast<float>(value); }
PYDIST_DEVICE float before_narrowing(float value) { return value; }
PYDIST_DEVICE float before_narrowing(double value) { return to_float32_odd(value); }

template <int kWidth, typename Value>
PYDIST_DEVICE void store_group(void* base, std::uint64_t element, DType dtype,
                               const Value (&values)[kWidth]) {
  if (dtype == DType::kFloat64) {
    unsigned char* const to = at(base, element * 8);
    PYDIST_UNROLL
    for (int v = 0; v < kWidth; v += 2) {
      std::uint64_t bits[2] = {};
      PYDIST_UNROLL
      for (int w = 0; w < 2 && v + w < kWidth; ++w) {
        bits[w] = bits_as<std::uint64_t>(canonical(static_cast<double>(values[v + w])));
      }
      const Words words = {
          {static_cast<std::uint32_t>(bits[0]), static_cast<std::uint32_t>(bits[0] >> 32),
           static_cast<std::uint32_t>(bits[1]), static_cast<std::uint32_t>(bits[1] >> 32)}};
      if constexpr (kWidth == 1) {
        store_8(to, words);
      } else {
        store_16(to + v * 8, words);
      }
    }
  } else if (dtype == DType::kFloat32) {
    Words words = {};
    PYDIST_UNROLL
    for (int v = 0; v < kWidth; ++v) {
      words.word[v] = bits_as<std::uint32_t>(canonical(to_float32(values[v])));
    }
    if constexpr (kWidth == 1) {
      store_4(at(base, element * 4), words.word[0]);
    } else {
      store_16(at(base, element * 4), words);
    }
  } else {
    std::uint32_t half[kGroup] = {};
    PYDIST_UNROLL
    for (int v = 0; v < kWidth; ++v) {
      const float value = before_narrowing(values[v]);
      half[v] = dtype == DType::kFloat16 ? narrow_float16(value) : narrow_bfloat16(value);
    }
    if constexpr (kWidth == 1) {
      store_2(at(base, element * 2), half[0]);
    } else {
      store_8(at(base, element * 2), Words{{half[0] | half[1] << 16, half[2] | half[3] << 16}});
    }
  }
}

}  // namespace pydist::cuda
