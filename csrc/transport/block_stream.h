// How long messages pass between two ranks of a host, both ways: piece by piece, each in a block of
// a pool of its own. Here no block waits for anybody to ask for it, so there is always another one
// soon.
//
// Used by one thread at a time, as one end. The bell of the other end is the caller's to ring.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "health/condition.h"
#include "transport/block_pool.h"

namespace pydist {

inline constexpr std::size_t kStreamBlocks = 4;  // of each rank

class BlockStream {
 public:
  // Each tells of one that has been sent: its number, its block, its length. As many as blocks.
  using Pieces = std::array<Counter, 2 * kStreamBlocks>;
  // One that has been sent, as the other end tells.
  struct Piece {
    int block;
    std::size_t bytes;
  };

  BlockStream() = default;
  BlockStream(const BlockPool& pool, Pieces& out, Pieces& in) noexcept
      : pool_(pool), out_(&out), in_(&in) {}

  [[nodiscard]] std::size_t piece_bytes() const noexcept { return pool_.block_bytes(); }

  // Whether there is a block to send in.
  [[nodiscard]] bool may_send() noexcept { return pool_.find(1) != 0; }
  // At most piece_bytes(), which is less than 16 MiB, and not nothing.
  void send(const std::byte* data, std::size_t bytes) noexcept;

  // The next one, if it has come. Whoever receives it knows how long it is to be: the memory of the
  // other end may be damaged.
  [[nodiscard]] std::optional<Piece> next() const noexcept;
  // Copies it, and is done with it. False, and nothing has happened: it can't lie there.
  [[nodiscard]] bool receive(const Piece& piece, std::byte* target) noexcept;

 private:
  BlockPool pool_;
  Pieces* out_ = nullptr;
  Pieces* in_ = nullptr;
  std::uint32_t sent_ = 0;
  std::uint32_t received_ = 0;
};

}  // namespace pydist
