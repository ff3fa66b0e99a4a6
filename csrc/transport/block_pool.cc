#include "transport/block_pool.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace pydist {
namespace {

constexpr BlockSet bit_of(int number) noexcept { return BlockSet{1} << number; }

void turn_over(BlockWord& word, BlockSet blocks) noexcept {
  word.store(word.load(std::memory_order_relaxed) ^ blocks, std::memory_order_release);
}

}  // namespace

BlockPool::BlockPool(const Areas& areas, std::size_t own_area, const Shape& shape, const Words& own,
                     const Words& other) noexcept
    : areas_(areas), shape_(shape), own_(own), other_(other) {
  add(((BlockSet{1} << shape.blocks) - 1) << (own_area * shape.blocks));
}

void BlockPool::add(BlockSet blocks) noexcept {
  // The one in the first block of a message is the first to be filled again.
  for (BlockSet left = blocks; left != 0;) {
    const int number = std::bit_width(left) - 1;
    order_[free_count_++] = static_cast<std::uint8_t>(number);
    left ^= bit_of(number);
  }
  free_ |= blocks;
}

void BlockPool::take_back() noexcept {
  const BlockSet given = other_.given_back->load(std::memory_order_acquire);
  // Damage could give what is here, or nowhere.
  add((given ^ seen_given_back_) & ~free_ & all());
  seen_given_back_ = given;
}

BlockSet BlockPool::find(std::size_t bytes) noexcept {
  if (free_count_ < shape_.blocks) {
    take_back();
  }
  const std::size_t count = count_for(bytes);
  BlockSet found = 0;
  if (count <= free_count_) {
    for (std::size_t i = free_count_ - count; i < free_count_; ++i) {
      found |= bit_of(order_[i]);
    }
  }
  return found;
}

void BlockPool::pass(BlockSet blocks) noexcept {
  free_ &= ~blocks;
  free_count_ -= static_cast<std::size_t>(std::popcount(blocks));
}

void BlockPool::fill(BlockSet blocks, const std::byte* data, std::size_t bytes) noexcept {
  pass(blocks);
  for (; blocks != 0; blocks &= blocks - 1) {
    const int number = std::countr_zero(blocks);
    const std::size_t piece = std::min(bytes, shape_.block_bytes);
    std::memcpy(block(number), data, piece);
    turn_over(*own_.filled, bit_of(number));
    data += piece;
    bytes -= piece;
  }
}

bool BlockPool::may_hold(BlockSet blocks, std::size_t bytes) const noexcept {
  return bytes != 0 && bytes <= most_bytes() && is_passed(blocks) &&
         static_cast<std::size_t>(std::popcount(blocks)) == count_for(bytes);
}

std::size_t BlockPool::copy(BlockSet blocks, std::byte* target, std::size_t bytes,
                            std::size_t done) const noexcept {
  for (std::size_t skipped = 0; skipped < done; skipped += shape_.block_bytes) {
    blocks &= blocks - 1;
  }
  for (; blocks != 0; blocks &= blocks - 1) {
    const int number = std::countr_zero(blocks);
    const BlockSet full = other_.filled->load(std::memory_order_acquire) ^ seen_filled_;
    if ((full & bit_of(number)) == 0) {
      break;
    }
    const std::size_t piece = std::min(bytes - done, shape_.block_bytes);
    std::memcpy(target + done, block(number), piece);
    done += piece;
  }
  return done;
}

void BlockPool::empty(BlockSet blocks) noexcept {
  seen_filled_ ^= blocks;
  accept(blocks);
}

void BlockPool::accept(BlockSet blocks) noexcept {
  take_back();
  add(blocks & ~free_);
  if (free_count_ > shape_.blocks) {
    give_back(free_count_ - shape_.blocks, static_cast<std::size_t>(std::popcount(blocks)));
  }
}

void BlockPool::give_back(std::size_t count, std::size_t kept_last) noexcept {
  const auto end = order_.begin() + static_cast<std::ptrdiff_t>(free_count_ - kept_last);
  const auto begin = end - static_cast<std::ptrdiff_t>(count);
  BlockSet given = 0;
  std::for_each(begin, end, [&given](std::uint8_t number) { given |= bit_of(number); });
  std::copy(end, order_.begin() + static_cast<std::ptrdiff_t>(free_count_), begin);
  free_count_ -= count;
  free_ &= ~given;
  turn_over(*own_.given_back, given);
}

}  // namespace pydist
