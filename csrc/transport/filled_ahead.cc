#include "transport/filled_ahead.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace pydist {
namespace {

constexpr BlockSet lowest_of(BlockSet blocks) noexcept { return blocks & (~blocks + 1); }

}  // namespace

BlockSet FilledAhead::find_free(std::size_t bytes) const noexcept {
  BlockSet free = ~static_cast<BlockSet>(filled_.load(std::memory_order_relaxed) ^
                                         emptied_.load(std::memory_order_acquire));
  BlockSet found = 0;
  for (std::size_t left = count_for(bytes); left != 0; --left) {
    if (free == 0) {
      return 0;
    }
    found |= lowest_of(free);
    free &= free - 1;
  }
  return found;
}

void FilledAhead::fill(BlockSet blocks, const std::byte* data, std::size_t bytes) noexcept {
  for (; blocks != 0; blocks &= blocks - 1) {
    const std::size_t piece = std::min(bytes, block_bytes_);
    std::memcpy(blocks_ + static_cast<std::size_t>(std::countr_zero(blocks)) * block_bytes_, data,
                piece);
    filled_.store(filled_.load(std::memory_order_relaxed) ^ lowest_of(blocks),
                  std::memory_order_release);
    data += piece;
    bytes -= piece;
  }
}

bool FilledAhead::fit(BlockSet blocks, std::size_t bytes) const noexcept {
  return bytes != 0 && bytes <= most_bytes() &&
         static_cast<std::size_t>(std::popcount(blocks)) == count_for(bytes);
}

std::size_t FilledAhead::copy(BlockSet blocks, std::byte* target, std::size_t bytes,
                              std::size_t done) const noexcept {
  for (std::size_t skipped = 0; skipped < done; skipped += block_bytes_) {
    blocks &= blocks - 1;
  }
  const std::uint64_t emptied = emptied_.load(std::memory_order_relaxed);
  for (; blocks != 0; blocks &= blocks - 1) {
    if (((filled_.load(std::memory_order_acquire) ^ emptied) & lowest_of(blocks)) == 0) {
      break;
    }
    const std::size_t piece = std::min(bytes - done, block_bytes_);
    std::memcpy(target + done,
                blocks_ + static_cast<std::size_t>(std::countr_zero(blocks)) * block_bytes_, piece);
    done += piece;
  }
  return done;
}

void FilledAhead::empty(BlockSet blocks) noexcept {
  emptied_.store(emptied_.load(std::memory_order_relaxed) ^ blocks, std::memory_order_release);
}

}  // namespace pydist
