#include "reducer/operations/hook_policy.h"

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"

namespace pydist {

BucketHook::BucketHook(std::shared_ptr<c10d::CommHookInterface> hook, const GradientArena& arena)
    : hook_(std::move(hook)) {
  adapt(arena);
}

void BucketHook::adapt(const GradientArena& arena) {
  views_.clear();
  for (const GradientBucket& bucket : arena.buckets()) {
    View& view = views_.emplace_back();
    view.label = bucket.label;
    std::vector<std::int64_t> ends;
    for (const std::size_t index : bucket.slots) {
      const GradientSlot& slot = arena.slots()[index];
      view.offsets.push_back(static_cast<std::size_t>(slot.offset));
      view.lengths.push_back(slot.view.nbytes() / bucket.memory.itemsize());
      view.sizes.push_back(slot.view.sizes().vec());
      if (slot.view.is_complex()) {
        view.sizes.back().push_back(2);
      }
      view.parameters.push_back(slot.parameter);
      ends.push_back(slot.offset + static_cast<std::int64_t>(view.lengths.back()));
    }
    for (std::size_t i = 0; i < ends.size(); ++i) {
      const std::int64_t next = i + 1 < ends.size() ? static_cast<std::int64_t>(view.offsets[i + 1])
                                                    : bucket.memory.numel();
      if (next > ends[i]) {
        view.padding.emplace_back(ends[i], next - ends[i]);
      }
    }
  }
}

void BucketHook::start(std::size_t bucket, const at::Tensor& memory,
                       std::function<void()> on_completion) {
  const View& view = views_[bucket];
  for (const auto& [begin, count] : view.padding) {
    memory.narrow(0, begin, count).zero_();  // a hook has written there, or may take a norm
  }
  c10d::GradBucket grad_bucket(bucket, views_.size(), memory, view.offsets, view.lengths,
                               {view.sizes.begin(), view.sizes.end()}, view.parameters,
                               std::nullopt);
  promises_.push_back({bucket, memory, hook_->runHook(grad_bucket)});
  promises_.back().future->addCallback(
      [on_completion = std::move(on_completion)](const auto& /*future*/) { on_completion(); });
}

void BucketHook::wait() {
  for (const Promise& promise : promises_) {
    promise.future->wait();
    const at::Tensor averaged = hook_->parseHookResult(promise.future->value());
    const at::Tensor& memory = promise.memory;
    if (averaged.const_data_ptr() == memory.const_data_ptr()) {
      continue;
    }
    if (averaged.numel() != memory.numel()) {
      throw InvalidUsage(join("the communication hook returned ", averaged.numel(),
                              " elements for ", views_[promise.bucket].label, ", which has ",
                              memory.numel()));
    }
    memory.copy_(averaged.reshape(memory.sizes()));
  }
}

bool BucketHook::is_over() const {
  return std::all_of(promises_.begin(), promises_.end(),
                     [](const Promise& promise) { return promise.future->completed(); });
}

}  // namespace pydist
