// How an operation on device memory is cut into parts that pass through host memory. Pure index
// arithmetic.
//
// A part is copied from the device into a *slot* of host memory, goes through the host's
// communicator there, in place where that is possible, and is copied back.
//
//   all_reduce, broadcast, reduce   elements [k c, (k+1) c) of the buffer
//   reduce_scatter, all_gather      elements [k c, (k+1) c) of each rank's block
//   everything else                 one part, in memory of its own size: a rank does not know how
//                                   much the others have
//
// c depends on the size of a slot, on the ranks and on the dtype alone, so all ranks cut alike.
// Cutting leaves sums as they are where the host's backend adds in an order that does not depend on
// where an element lies (equal_for_all_chunkings), and always keeps them equal on all ranks.

#pragma once

#include <cstddef>
#include <vector>

#include "communicator/operation.h"

namespace pydist {

// Between device memory and the slot's bytes [offset, offset + bytes).
struct StagedCopy {
  std::byte* device = nullptr;
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

struct StagedPart {
  Operation operation;  // on the slot
  std::vector<StagedCopy> before;
  std::vector<StagedCopy> after;
};

class StagingParts {
 public:
  // The operation is valid, and must live as long as this object. `slot_bytes` is at least
  // least_slot_bytes().
  StagingParts(const Operation& operation, int rank, int size, std::size_t slot_bytes);

  // Whether all of it takes one slot of slot_bytes() of its own.
  [[nodiscard]] bool is_whole() const noexcept { return is_whole_; }
  [[nodiscard]] std::size_t slot_bytes() const noexcept { return slot_bytes_; }
  // At least one: also empty operations take place.
  [[nodiscard]] std::size_t count() const noexcept { return count_of_parts_; }
  [[nodiscard]] StagedPart part(std::size_t index, std::byte* slot) const;

  [[nodiscard]] static std::size_t least_slot_bytes(int size) noexcept;

 private:
  [[nodiscard]] StagedPart flat_part(std::size_t index, std::byte* slot) const;
  [[nodiscard]] StagedPart block_part(std::size_t index, std::byte* slot) const;
  [[nodiscard]] StagedPart whole_part(std::byte* slot) const;
  [[nodiscard]] Operation on_host() const;

  const Operation& operation_;
  const std::size_t rank_;
  const std::size_t size_;
  std::size_t slot_bytes_;
  bool is_whole_ = false;
  bool has_blocks_ = false;
  bool is_ragged_ = false;
  DType dtype_ = DType::kUInt8;
  std::size_t chunk_ = 0;  // elements of a part, of each block
  std::size_t count_ = 0;  // elements, of the largest block
  std::size_t count_of_parts_ = 1;
};

}  // namespace pydist
