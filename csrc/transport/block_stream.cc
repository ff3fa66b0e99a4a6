#include "transport/block_stream.h"

#include <bit>
#include <cstring>

namespace pydist {
namespace {

// A word for a piece: its number, which the first one with 1 begins, above its length and its
// block.
constexpr int kBlockBits = 8;
constexpr int kBytesBits = 24;
constexpr int kNumberShift = kBlockBits + kBytesBits;

static_assert(2 * kStreamBlocks <= 1 << kBlockBits);

constexpr std::uint64_t low(std::uint64_t word, int bits) noexcept {
  return word & ((std::uint64_t{1} << bits) - 1);
}

}  // namespace

void BlockStream::send(const std::byte* data, std::size_t bytes) noexcept {
  const BlockSet found = pool_.find(1);
  const int block = std::countr_zero(found);
  std::memcpy(pool_.block(block), data, bytes);
  pool_.pass(found);
  Counter& word = (*out_)[sent_ % out_->size()];
  ++sent_;
  word.store((std::uint64_t{sent_} << kNumberShift) | (std::uint64_t{bytes} << kBlockBits) |
                 static_cast<std::uint64_t>(block),
             std::memory_order_release);
}

std::optional<BlockStream::Piece> BlockStream::next() const noexcept {
  const std::uint64_t word = (*in_)[received_ % in_->size()].load(std::memory_order_acquire);
  if (word >> kNumberShift != static_cast<std::uint32_t>(received_ + 1)) {
    return std::nullopt;
  }
  return Piece{static_cast<int>(low(word, kBlockBits)),
               static_cast<std::size_t>(low(word >> kBlockBits, kBytesBits))};
}

bool BlockStream::receive(const Piece& piece, std::byte* target) noexcept {
  if (piece.block >= static_cast<int>(2 * kStreamBlocks) || piece.bytes > piece_bytes() ||
      !pool_.is_passed(BlockSet{1} << piece.block)) {
    return false;
  }
  std::memcpy(target, pool_.block(piece.block), piece.bytes);
  pool_.accept(BlockSet{1} << piece.block);
  ++received_;
  return true;
}

}  // namespace pydist
