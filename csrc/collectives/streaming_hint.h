// When the stores of a collective bypass the cache.

#pragma once

#include <cstddef>

#include "kernels/cpu/reduce.h"

namespace pydist {

// From here on, results no longer fit the caches, and stores that bypass them save reading the
// lines first. Measured with bench/engine.
inline constexpr std::size_t kStreamingBytes = std::size_t{8} << 20;

// For results of `bytes` in one buffer.
[[nodiscard]] constexpr StoreHint hint_for(std::size_t bytes) noexcept {
  return bytes >= kStreamingBytes ? StoreHint::kStreaming : StoreHint::kCached;
}

}  // namespace pydist
