#include "communicator/staging_parts.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "collectives/call.h"

namespace pydist {
namespace {

// Elements: parts begin where vector loads and cache lines do.
constexpr std::size_t kGrain = 64;
constexpr std::size_t kLargestElement = 16;
// Bytes.
constexpr std::size_t kAlignment = 64;

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) & ~(kAlignment - 1); }

// What is left of `count` elements from `begin` on, but no more than `most`.
std::size_t part_of(std::size_t count, std::size_t begin, std::size_t most) {
  return count <= begin ? 0 : std::min(count - begin, most);
}

}  // namespace

std::size_t StagingParts::least_slot_bytes(int size) noexcept {
  return static_cast<std::size_t>(size) * kGrain * kLargestElement;
}

StagingParts::StagingParts(const Operation& operation, int rank, int size, std::size_t slot_bytes)
    : operation_(operation),
      rank_(static_cast<std::size_t>(rank)),
      size_(static_cast<std::size_t>(size)),
      slot_bytes_(slot_bytes) {
  PYDIST_CHECK(slot_bytes >= least_slot_bytes(size));
  const Buffers& in = operation.inputs;
  const Buffers& out = operation.outputs;
  const Buffer* const first = operation.first_buffer();
  dtype_ = first == nullptr ? DType::kUInt8 : first->dtype;
  switch (operation.kind) {
    case OpKind::kAllReduce:
    case OpKind::kBroadcast:
    case OpKind::kReduce:
      count_ = first->count;
      break;
    case OpKind::kReduceScatter:
    case OpKind::kAllGather: {
      has_blocks_ = true;
      const Blocks blocks(operation.kind == OpKind::kAllGather ? out : in, size);
      is_ragged_ = blocks.is_ragged();
      for (int r = 0; r < size; ++r) {
        count_ = std::max(count_, blocks[r].count);
      }
      break;
    }
    default:
      is_whole_ = true;
      slot_bytes_ = 0;
      for (const auto* buffers : {&in, &out}) {
        for (const Buffer& buffer : *buffers) {
          slot_bytes_ += aligned(buffer.bytes());
        }
      }
      return;
  }
  const std::size_t elements = slot_bytes_ / element_size(dtype_) / (has_blocks_ ? size_ : 1);
  chunk_ = elements / kGrain * kGrain;
  count_of_parts_ = std::max((count_ + chunk_ - 1) / chunk_, std::size_t{1});
}

// The operation without its buffers.
Operation StagingParts::on_host() const {
  Operation operation = operation_;
  operation.inputs.clear();
  operation.outputs.clear();
  operation.stream = nullptr;
  operation.owner = nullptr;  // of memory on the device, which the staged operation holds
  return operation;
}

StagedPart StagingParts::part(std::size_t index, std::byte* slot) const {
  StagedPart part = is_whole_     ? whole_part(slot)
                    : has_blocks_ ? block_part(index, slot)
                                  : flat_part(index, slot);
  if (count_of_parts_ > 1) {
    std::string& label = part.operation.label;
    label += join(label.empty() ? "" : ", ", "part ", index + 1, " of ", count_of_parts_);
  }
  return part;
}

StagedPart StagingParts::flat_part(std::size_t index, std::byte* slot) const {
  const std::size_t width = element_size(dtype_);
  const std::size_t begin = index * chunk_;
  const std::size_t count = part_of(count_, begin, chunk_);
  const Buffer staged{.data = slot, .count = count, .dtype = dtype_, .device = {}};
  const auto copy_of = [&](const Buffer& buffer) {
    return StagedCopy{static_cast<std::byte*>(buffer.data) + begin * width, 0, count * width};
  };
  StagedPart part{.operation = on_host(), .before = {}, .after = {}};
  const Buffers& in = operation_.inputs;
  const Buffers& out = operation_.outputs;
  if (!in.empty()) {
    part.operation.inputs = {staged};
    part.before.push_back(copy_of(in[0]));
  }
  if (!out.empty()) {
    const bool is_sent = operation_.kind == OpKind::kBroadcast && !in.empty();
    if (!is_sent) {
      part.operation.outputs = {staged};
    }
    if (!is_sent || out[0].data != in[0].data) {
      part.after.push_back(copy_of(out[0]));
    }
  }
  return part;
}

StagedPart StagingParts::block_part(std::size_t index, std::byte* slot) const {
  const std::size_t width = element_size(dtype_);
  const std::size_t begin = index * chunk_;
  const bool gathers = operation_.kind == OpKind::kAllGather;
  const Blocks blocks(gathers ? operation_.outputs : operation_.inputs, static_cast<int>(size_));
  // Equal blocks lie side by side, and are one buffer.
  const std::size_t distance = is_ragged_ ? chunk_ : part_of(count_, begin, chunk_);
  StagedPart part{.operation = on_host(), .before = {}, .after = {}};
  std::vector<Buffer> staged;
  std::vector<StagedCopy> copies;
  for (std::size_t r = 0; r < size_; ++r) {
    const Block block = blocks[static_cast<int>(r)];
    const std::size_t count = part_of(block.count, begin, chunk_);
    const std::size_t offset = r * distance * width;
    staged.push_back({.data = slot + offset, .count = count, .dtype = dtype_, .device = {}});
    copies.push_back({block.data + begin * width, offset, count * width});
  }
  const Buffer own = staged[rank_];
  const Buffer& single = gathers ? operation_.inputs[0] : operation_.outputs[0];
  const StagedCopy own_copy{static_cast<std::byte*>(single.data) + begin * width,
                            copies[rank_].offset, copies[rank_].bytes};
  Buffers all =
      is_ragged_
          ? Buffers(std::move(staged))
          : Buffers{{.data = slot, .count = size_ * distance, .dtype = dtype_, .device = {}}};
  if (gathers) {
    part.operation.inputs = {own};
    part.operation.outputs = std::move(all);
    part.before.push_back(own_copy);
    part.after = std::move(copies);
  } else {
    part.operation.inputs = std::move(all);
    part.operation.outputs = {own};
    part.before = std::move(copies);
    part.after.push_back(own_copy);
  }
  return part;
}

StagedPart StagingParts::whole_part(std::byte* slot) const {
  StagedPart part{.operation = on_host(), .before = {}, .after = {}};
  std::size_t offset = 0;
  const auto stage = [&](const Buffers& buffers, Buffers& staged, std::vector<StagedCopy>& copies) {
    for (const Buffer& buffer : buffers) {
      staged.push_back(
          {.data = slot + offset, .count = buffer.count, .dtype = buffer.dtype, .device = {}});
      copies.push_back({static_cast<std::byte*>(buffer.data), offset, buffer.bytes()});
      offset += aligned(buffer.bytes());
    }
  };
  stage(operation_.inputs, part.operation.inputs, part.before);
  stage(operation_.outputs, part.operation.outputs, part.after);
  return part;
}

}  // namespace pydist
