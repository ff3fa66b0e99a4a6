#include "reducer/gradient_arena.h"

#include <ATen/ops/view_as_complex.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.h"
#include "c10d/device_streams.h"
#include "c10d/memory_tensor.h"

namespace pydist {
namespace {

// Slots start on a cache line, which every SIMD width divides.
constexpr std::int64_t kAlignmentBytes = 64;

at::ScalarType real_type(const at::Tensor& parameter) {
  return c10::toRealValueType(parameter.scalar_type());
}

// Elements of the real type that a slot takes.
std::int64_t real_count(const at::Tensor& parameter) {
  return parameter.numel() * (parameter.is_complex() ? 2 : 1);
}

std::int64_t padded(std::int64_t count, at::ScalarType dtype) {
  const std::int64_t alignment =
      kAlignmentBytes / static_cast<std::int64_t>(c10::elementSize(dtype));
  return (count + alignment - 1) / alignment * alignment;
}

// Optimizers and AccumulateGrad are fastest where gradient and parameter are laid out alike.
std::vector<std::int64_t> strides_for(const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) {
    return parameter.strides().vec();
  }
  std::vector<std::int64_t> strides(static_cast<std::size_t>(parameter.dim()));
  std::int64_t stride = 1;
  for (std::size_t dimension = strides.size(); dimension-- > 0;) {
    strides[dimension] = stride;
    stride *= parameter.size(static_cast<std::int64_t>(dimension));
  }
  return strides;
}

// A parameter's part of a block.
at::Tensor view_for(const GradientSlot& slot, const at::Tensor& block, std::int64_t offset) {
  const at::Tensor& parameter = slot.parameter;
  at::Tensor flat = block.narrow(0, offset, real_count(parameter));
  if (parameter.is_complex()) {
    flat = at::view_as_complex(flat.view({parameter.numel(), 2}));
  }
  const at::Tensor view = flat.as_strided(parameter.sizes(), slot.strides);
  // With a version of its own, which tells whether somebody has written into the slot.
  return view.variable_data();
}

// One-dimensional. Collective.
at::Tensor allocate_zeros(Communicator& communicator, std::int64_t count, at::ScalarType dtype,
                          Device device) {
  const std::size_t bytes = static_cast<std::size_t>(count) * c10::elementSize(dtype);
  return tensor_over(communicator.allocate(bytes, device), {count}, dtype, device).zero_();
}

}  // namespace

GradientSlot& GradientArena::add(std::string name, at::Tensor parameter, bool is_sparse) {
  GradientSlot& slot = slots_.emplace_back();
  slot.index = slots_.size() - 1;
  slot.name = std::move(name);
  slot.parameter = std::move(parameter);
  slot.is_sparse = is_sparse;
  slot.strides = strides_for(slot.parameter);
  block_of_.push_back(kNoBlock);
  return slot;
}

void GradientArena::allocate() {
  // Ranks have other devices, but they meet them in the same order.
  using Kind = std::pair<at::ScalarType, at::Device>;
  std::vector<std::pair<Kind, std::int64_t>> added;  // and the elements of each
  for (const GradientSlot& slot : slots_) {
    if (slot.is_sparse || block_of_[slot.index] != kNoBlock) {
      continue;
    }
    const Kind kind(real_type(slot.parameter), slot.parameter.device());
    auto found = std::find_if(added.begin(), added.end(),
                              [&kind](const auto& each) { return each.first == kind; });
    if (found == added.end()) {
      found = added.insert(added.end(), {kind, 0});
    }
    block_of_[slot.index] = blocks_.size() + static_cast<std::size_t>(found - added.begin());
    found->second += padded(real_count(slot.parameter), kind.first);
  }
  for (const auto& [kind, count] : added) {
    blocks_.push_back(allocate_zeros(*communicator_, count, kind.first, device_of(kind.second)));
  }
}

void GradientArena::arrange(const BucketPlan& plan) {
  if (const std::string why = why_invalid(plan, block_of_); !why.empty()) {
    throw InvalidUsage(join("a plan of buckets does not fit the model: ", why));
  }
  std::vector<at::Tensor> moving(slots_.size());
  for (const GradientSlot& slot : slots_) {
    if (!slot.is_sparse && holds_gradient(slot)) {
      moving[slot.index] = slot.parameter.grad().clone();
    }
  }
  plan_ = plan;
  buckets_.clear();
  std::vector<std::int64_t> filled(blocks_.size(), 0);
  for (const std::vector<std::size_t>& members : plan) {
    const std::size_t number = block_of_[members.front()];
    const at::Tensor& block = blocks_[number];
    const std::int64_t begin = filled[number];
    for (const std::size_t index : members) {
      GradientSlot& slot = slots_[index];
      slot.view = view_for(slot, block, filled[number]);
      slot.bucket = buckets_.size();
      filled[number] += padded(real_count(slot.parameter), block.scalar_type());
    }
    GradientBucket& bucket = buckets_.emplace_back();
    bucket.label =
        join("bucket ", buckets_.size() - 1, ", first parameter ", slots_[members.front()].name);
    bucket.memory = block.narrow(0, begin, filled[number] - begin);
    bucket.slots = members;
  }
  for (GradientSlot& slot : slots_) {
    if (!has_place(slot)) {
      slot.bucket = buckets_.empty() ? 0 : buckets_.size() - 1;
    } else if (moving[slot.index].defined()) {
      // The same tensor, for those who hold it; and as touched as it was.
      slot.view.copy_(moving[slot.index]);
      slot.parameter.mutable_grad().set_data(slot.view);
    }
  }
}

at::Tensor GradientArena::largest_block() const {
  at::Tensor largest;
  for (const at::Tensor& block : blocks_) {
    if (!largest.defined() || block.nbytes() > largest.nbytes()) {
      largest = block;
    }
  }
  return largest;
}

}  // namespace pydist
