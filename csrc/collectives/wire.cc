#include "collectives/wire.h"

#include <algorithm>
#include <array>

#include "kernels/convert_cpu.h"

namespace pydist {
namespace {

// One's own operand is converted, and the result back, a tile at a time: both stay in the
// innermost cache, and nothing is allocated.
constexpr std::size_t kTileBytes = std::size_t{8} << 10;

}  // namespace

void Wire::convert(DType from, const std::byte* input, DType to, std::byte* output,
                   std::size_t count) {
  if (to == DType::kFloat32) {
    widen_to_float32(from, input, reinterpret_cast<float*>(output), count);
  } else {
    narrow_from_float32(to, reinterpret_cast<const float*>(input), output, count);
  }
}

void Wire::combine_converted(const Reduction& reduction, std::span<const void*> pieces,
                             std::size_t own, std::byte* slot, std::byte* output,
                             std::size_t count) const {
  alignas(64) std::array<std::byte, kTileBytes> tile;
  const std::size_t per_tile = kTileBytes / wire_element_bytes_;
  const auto* mine = static_cast<const std::byte*>(pieces[own]);
  pieces[own] = tile.data();
  for (std::size_t begin = 0; begin < count; begin += per_tile) {
    const std::size_t n = std::min(per_tile, count - begin);
    put(tile.data(), mine + begin * element_size(buffers_), n);
    // Without a slot, the result takes the place of the operand.
    std::byte* const result = slot == nullptr ? tile.data() : slot + bytes(begin);
    void* const target = result;
    reduce(reduction, pieces, {&target, 1}, n);
    if (output != nullptr) {
      take(output + begin * element_size(buffers_), result, n);
    }
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      if (i != own) {
        pieces[i] = static_cast<const std::byte*>(pieces[i]) + bytes(n);
      }
    }
  }
}

}  // namespace pydist
