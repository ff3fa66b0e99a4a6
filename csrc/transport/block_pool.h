// Blocks of shared memory that two ranks of a host pass to and fro: one fills some with a message
// and the other empties them, and has them to fill from then on. So a sender need not wait for its
// receiver, and a message that nobody asks for keeps its blocks and is in nobody's way.
//
// Note [Filled where it was read]
// Each rank begins with as many blocks of its own. It fills those that it has emptied last: then it
// writes lines that its cache holds since it has read them. Lines that it had filled itself, and
// that the other one has read, would have to be taken back from that one's cache first. Between
// cores that share no cache, exchanges take three quarters of the time so. (Collectives do the
// same: see decision 11 of the documentation.)
// Where messages go one way, their receiver would soon have all blocks. So it keeps as many as it
// began with, and gives others back: not those that it has just emptied, but the ones before.
//
// Of each end there are two words in shared memory, with a bit for each block that it alone writes:
// one is turned over when it has filled the block, the other when it gives the block back. Each
// end remembers what it has seen of the other's words, and which blocks it has.

#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace pydist {

// Some of the blocks, a bit each. The bytes of a message lie in its blocks in the order of the
// bits.
using BlockSet = std::uint64_t;
using BlockWord = std::atomic<BlockSet>;

class BlockPool {
 public:
  struct Words {
    BlockWord* filled;  // null where fill() and copy() are not used
    BlockWord* given_back;
  };
  // What the rank of the lower number begins with, and the other one: each with as many blocks.
  using Areas = std::array<std::byte*, 2>;

  // Of each rank, in the beginning.
  struct Shape {
    std::size_t blocks;  // 1 to 32
    std::size_t block_bytes;
  };

  BlockPool() = default;
  // One end of it, which begins with the blocks of `own_area`. All memory is zeroed before the
  // first use, and outlives both ends. Of a rank and itself both areas are the same, and so are the
  // words; there is one end.
  BlockPool(const Areas& areas, std::size_t own_area, const Shape& shape, const Words& own,
            const Words& other) noexcept;

  [[nodiscard]] std::size_t block_bytes() const noexcept { return shape_.block_bytes; }

  // Of a message, so that several fit: a power of two, as the ends of size classes.
  [[nodiscard]] std::size_t most_bytes() const noexcept {
    return std::bit_floor(shape_.blocks / 2 * shape_.block_bytes);
  }

  // Blocks to fill with so many bytes, more than 0; none where this end has too few. All blocks
  // have memory by then.
  [[nodiscard]] BlockSet find(std::size_t bytes) noexcept;
  // `blocks`: what find() has just found. Each is full as soon as its part of the message is there.
  void fill(BlockSet blocks, const std::byte* data, std::size_t bytes) noexcept;

  // Whether the other end may have filled them with a message of so many bytes.
  [[nodiscard]] bool may_hold(BlockSet blocks, std::size_t bytes) const noexcept;
  // Of a message whose first bytes up to `done`, the end of a block, have been copied: copies what
  // has come since. Returns up to where.
  [[nodiscard]] std::size_t copy(BlockSet blocks, std::byte* target, std::size_t bytes,
                                 std::size_t done) const noexcept;
  // All of the message has been copied.
  void empty(BlockSet blocks) noexcept;

  // The same without the words of full blocks, for a caller that tells the other end by itself.
  // What find() has just found is the other end's from now on.
  void pass(BlockSet blocks) noexcept;
  // What the other end has passed, and this one has emptied, is this one's from now on.
  void accept(BlockSet blocks) noexcept;
  // Whether there is such a block, which this end doesn't have.
  [[nodiscard]] bool is_passed(BlockSet blocks) const noexcept {
    return (blocks & free_) == 0 && (blocks & ~all()) == 0;
  }
  [[nodiscard]] std::byte* block(int number) const noexcept {
    const auto index = static_cast<std::size_t>(number);
    return areas_[index / shape_.blocks] + index % shape_.blocks * shape_.block_bytes;
  }

 private:
  [[nodiscard]] BlockSet all() const noexcept { return ~BlockSet{0} >> (64 - 2 * shape_.blocks); }
  [[nodiscard]] std::size_t count_for(std::size_t bytes) const noexcept {
    return (bytes + shape_.block_bytes - 1) / shape_.block_bytes;
  }
  void add(BlockSet blocks) noexcept;
  // What the other end has given back.
  void take_back() noexcept;
  // So many, but not of those that were emptied last.
  void give_back(std::size_t count, std::size_t kept_last) noexcept;

  Areas areas_ = {};
  Shape shape_ = {};
  Words own_ = {};
  Words other_ = {};
  BlockSet seen_filled_ = 0;  // of the other's words
  BlockSet seen_given_back_ = 0;
  // Those that this end may fill, and their numbers: the one that was emptied last is the last.
  BlockSet free_ = 0;
  std::array<std::uint8_t, 64> order_ = {};
  std::size_t free_count_ = 0;
};

}  // namespace pydist
