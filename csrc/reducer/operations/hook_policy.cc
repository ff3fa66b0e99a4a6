#include "reducer/operations/hook_policy.h"

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"

namespace pydist {

HookPolicy::HookPolicy(std::shared_ptr<c10d::CommHookInterface> hook, int divisor,
                       const GradientArena& arena)
    : arena_(arena), hook_(std::move(hook)), divisor_(divisor) {
  HookPolicy::adapt(arena);
}

void HookPolicy::adapt(const GradientArena& arena) {
  views_.clear();
  for (const GradientBucket& bucket : arena.buckets()) {
    View& view = views_.emplace_back();
    view.label = bucket.label;
    for (const std::size_t index : bucket.slots) {
      const GradientSlot& slot = arena.slots()[index];
      view.offsets.push_back(static_cast<std::size_t>(slot.offset));
      view.lengths.push_back(slot.view.nbytes() / bucket.memory.itemsize());
      view.sizes.push_back(slot.view.sizes().vec());
      if (slot.view.is_complex()) {
        view.sizes.back().push_back(2);
      }
      view.parameters.push_back(slot.parameter);
    }
  }
}

void HookPolicy::prepare(const DepartingBucket& bucket, const Combination& combination) {
  if (combination.op == ReduceOp::kPremulSum) {
    at::Tensor memory = bucket.memory;
    memory.mul_(combination.factor * divisor_);
  }
}

WorkPtr HookPolicy::reduce(const DepartingBucket& bucket, const Combination& /*combination*/,
                           Work::Callback on_completion) {
  if (has_raised_) {
    return nullptr;
  }
  const View& view = views_[bucket.number];
  c10d::GradBucket seen(bucket.number, bucket_count(), bucket.memory, view.offsets, view.lengths,
                        {view.sizes.begin(), view.sizes.end()}, view.parameters, std::nullopt);
  run(seen, view.label, bucket.memory);
  promises_.back().future->addCallback(
      [on_completion = std::move(on_completion)](const auto& /*future*/) { on_completion({}); });
  return nullptr;
}

at::Tensor HookPolicy::reduce_sparse(const GradientSlot& slot, const at::Tensor& gradient,
                                     const Combination& combination) {
  if (has_raised_) {
    return gradient;
  }
  const at::Tensor memory = combination.op == ReduceOp::kPremulSum
                                ? scaled(gradient, {combination.factor * divisor_, std::nullopt})
                                : gradient;
  // Every bucket that has left before has made a promise.
  c10d::GradBucket seen(promises_.size(), bucket_count(), memory, {}, {}, {}, {slot.parameter},
                        std::nullopt);
  run(seen, join("the gradient of ", slot.name), memory);
  return memory;
}

std::size_t HookPolicy::bucket_count() const {
  const std::vector<GradientSlot>& slots = arena_.slots();
  return views_.size() +
         static_cast<std::size_t>(std::count_if(
             slots.begin(), slots.end(), [](const GradientSlot& slot) { return slot.is_sparse; }));
}

void HookPolicy::run(c10d::GradBucket& bucket, std::string label, const at::Tensor& memory) {
  has_raised_ = true;  // unless it returns
  promises_.push_back({std::move(label), memory, hook_->runHook(bucket)});
  has_raised_ = false;
}

void HookPolicy::finish() {
  for (const Promise& promise : promises_) {
    promise.future->wait();
    const at::Tensor averaged = hook_->parseHookResult(promise.future->value());
    const at::Tensor& memory = promise.memory;
    if (memory.is_sparse()) {
      if (!averaged.is_sparse() || averaged.sizes() != memory.sizes()) {
        throw InvalidUsage(join("the communication hook returned a ",
                                averaged.is_sparse() ? "sparse" : "dense", " tensor of shape ",
                                averaged.sizes(), " for ", promise.label,
                                ", which is sparse, of shape ", memory.sizes()));
      }
      if (!averaged.is_same(memory)) {
        at::Tensor(memory).copy_(averaged);
      }
      continue;
    }
    if (averaged.const_data_ptr() == memory.const_data_ptr()) {
      continue;
    }
    if (averaged.numel() != memory.numel()) {
      throw InvalidUsage(join("the communication hook returned ", averaged.numel(),
                              " elements for ", promise.label, ", which has ", memory.numel()));
    }
    memory.copy_(averaged.reshape(memory.sizes()));
  }
}

bool HookPolicy::is_over() const {
  return std::all_of(promises_.begin(), promises_.end(),
                     [](const Promise& promise) { return promise.future->completed(); });
}

}  // namespace pydist
