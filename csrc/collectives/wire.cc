#include "collectives/wire.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/cpu/convert.h"

namespace pydist {
namespace {

// Elements that are computed on their way are computed a tile at a time, on the stack: the tile
// stays in the innermost cache, and nothing is allocated.
constexpr std::size_t kTileBytes = std::size_t{8} << 10;
using Tile = std::array<std::byte, kTileBytes>;

void advance(std::span<const void*> pieces, std::size_t bytes) {
  for (const void*& piece : pieces) {
    piece = static_cast<const std::byte*>(piece) + bytes;
  }
}

}  // namespace

void Wire::convert(DType from, const std::byte* input, DType to, std::byte* output,
                   std::size_t count) {
  if (to == DType::kFloat32) {
    widen_to_float32(from, input, reinterpret_cast<float*>(output), count);
  } else {
    narrow_from_float32(to, reinterpret_cast<const float*>(input), output, count);
  }
}

void Wire::put_converted(std::byte* slot, const std::byte* elements, std::size_t count) const {
  alignas(64) Tile tile;
  const std::size_t per_tile = kTileBytes / wire_element_bytes_;
  for (std::size_t begin = 0; begin < count; begin += per_tile) {
    const std::size_t n = std::min(per_tile, count - begin);
    convert(buffers_, elements + begin * element_size(buffers_), wire_, tile.data(), n);
    std::memcpy(slot + bytes(begin), tile.data(), bytes(n));
  }
}

// The copy finds the result in the innermost cache.
void Wire::combine_into_both(const Reduction& reduction, std::span<const void*> pieces,
                             std::byte* slot, std::byte* output, std::size_t count) const {
  const std::size_t per_tile = kTileBytes / wire_element_bytes_;
  for (std::size_t begin = 0; begin < count; begin += per_tile) {
    const std::size_t n = std::min(per_tile, count - begin);
    void* const target = output + bytes(begin);
    reduce(reduction, pieces, {&target, 1}, n);
    std::memcpy(slot + bytes(begin), target, bytes(n));
    advance(pieces, bytes(n));
  }
}

void Wire::combine_into_slot(const Reduction& reduction, std::span<const void*> pieces,
                             std::byte* slot, std::size_t count) const {
  alignas(64) Tile tile;
  const std::size_t per_tile = kTileBytes / wire_element_bytes_;
  void* const target = tile.data();
  for (std::size_t begin = 0; begin < count; begin += per_tile) {
    const std::size_t n = std::min(per_tile, count - begin);
    reduce(reduction, pieces, {&target, 1}, n);
    std::memcpy(slot + bytes(begin), tile.data(), bytes(n));
    advance(pieces, bytes(n));
  }
}

void Wire::combine_converted(const Reduction& reduction, std::span<const void*> pieces,
                             std::size_t own, std::byte* slot, std::byte* output,
                             std::size_t count) const {
  alignas(64) Tile tile;
  const std::size_t per_tile = kTileBytes / wire_element_bytes_;
  const auto* mine = static_cast<const std::byte*>(pieces[own]);
  pieces[own] = tile.data();
  // The result takes the place of the operand.
  void* const target = tile.data();
  for (std::size_t begin = 0; begin < count; begin += per_tile) {
    const std::size_t n = std::min(per_tile, count - begin);
    convert(buffers_, mine + begin * element_size(buffers_), wire_, tile.data(), n);
    reduce(reduction, pieces, {&target, 1}, n);
    if (slot != nullptr) {
      std::memcpy(slot + bytes(begin), tile.data(), bytes(n));
    }
    if (output != nullptr) {
      take(output + begin * element_size(buffers_), tile.data(), n);
    }
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      if (i != own) {
        pieces[i] = static_cast<const std::byte*>(pieces[i]) + bytes(n);
      }
    }
  }
}

}  // namespace pydist
