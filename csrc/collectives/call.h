// A collective as the algorithms see it: validated, with its blocks resolved. A view: the buffers
// belong to the operation that it was made from.

#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "base/buffer.h"
#include "base/op_kind.h"
#include "base/reduce_op.h"

namespace pydist {

struct Block {
  std::byte* data = nullptr;
  std::size_t count = 0;  // elements
};

// The blocks of all ranks: equal parts of one buffer, or one buffer for each rank. Or none.
class Blocks {
 public:
  Blocks() = default;
  Blocks(std::span<const Buffer> buffers, int size) noexcept : buffers_(buffers), size_(size) {}

  [[nodiscard]] bool empty() const noexcept { return buffers_.empty(); }

  [[nodiscard]] Block operator[](int rank) const noexcept {
    const auto index = static_cast<std::size_t>(rank);
    if (buffers_.size() == static_cast<std::size_t>(size_)) {
      return {static_cast<std::byte*>(buffers_[index].data), buffers_[index].count};
    }
    const Buffer& all = buffers_[0];
    const std::size_t count = all.count / static_cast<std::size_t>(size_);
    return {static_cast<std::byte*>(all.data) + index * count * element_size(all.dtype), count};
  }

  // Elements of all blocks together.
  [[nodiscard]] std::size_t total() const noexcept {
    std::size_t total = 0;
    for (const Buffer& buffer : buffers_) {
      total += buffer.count;
    }
    return total;
  }

  [[nodiscard]] bool is_ragged() const noexcept {
    return std::any_of(buffers_.begin(), buffers_.end(),
                       [this](const Buffer& buffer) { return buffer.count != buffers_[0].count; });
  }

  // Whether the blocks follow each other in memory, so that they can be addressed as one.
  [[nodiscard]] bool is_contiguous() const noexcept { return buffers_.size() == 1; }

  [[nodiscard]] std::span<const Buffer> buffers() const noexcept { return buffers_; }

 private:
  std::span<const Buffer> buffers_;
  int size_ = 1;
};

struct Call {
  OpKind kind;
  DType dtype;
  DType wire_dtype;  // the type in which elements travel; `dtype` where they are not converted
  ReduceOp op;
  int root;  // 0 where the kind has none
  double factor;
  Blocks inputs;   // of one block where the kind takes one buffer
  Blocks outputs;  // likewise; none where this rank receives nothing
  // Elements of the buffer for all_reduce, broadcast and reduce; of one block for the kinds that
  // have blocks, where all of them are equal (otherwise of this rank's own).
  std::size_t count;
  DeviceFactor device_factor{};  // see Operation

  // The blocks that this rank sends to `peer`, and receives from it, in gather, scatter and
  // all_to_all. A block has no elements where no data moves.
  [[nodiscard]] Block sent_to(int peer) const noexcept {
    if (kind == OpKind::kGather) {
      return peer == root ? inputs[0] : Block{};
    }
    return inputs.empty() ? Block{} : inputs[peer];
  }
  [[nodiscard]] Block received_from(int peer) const noexcept {
    if (kind == OpKind::kScatter) {
      return peer == root ? outputs[0] : Block{};
    }
    return outputs.empty() ? Block{} : outputs[peer];
  }
};

}  // namespace pydist
