#include "reducer/bucket_hook.h"

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
    view.payload = bucket.memory;
    std::vector<std::int64_t> ends;
    for (const std::size_t index : bucket.slots) {
      const GradientSlot& slot = arena.slots()[index];
      const std::int64_t offset = slot.view.storage_offset() * (slot.view.is_complex() ? 2 : 1) -
                                  bucket.memory.storage_offset();
      view.offsets.push_back(static_cast<std::size_t>(offset));
      view.lengths.push_back(slot.view.nbytes() / bucket.memory.itemsize());
      view.sizes.push_back(slot.view.sizes().vec());
      if (slot.view.is_complex()) {
        view.sizes.back().push_back(2);
      }
      view.parameters.push_back(slot.parameter);
      const std::int64_t end = offset + static_cast<std::int64_t>(view.lengths.back());
      ends.push_back(end);
    }
    for (std::size_t i = 0; i < ends.size(); ++i) {
      const std::int64_t next = i + 1 < ends.size() ? static_cast<std::int64_t>(view.offsets[i + 1])
                                                    : view.payload.numel();
      if (next > ends[i]) {
        view.padding.push_back(view.payload.narrow(0, ends[i], next - ends[i]));
      }
    }
  }
}

void BucketHook::start(std::size_t bucket, std::function<void()> on_completion) {
  const View& view = views_[bucket];
  for (const at::Tensor& padding : view.padding) {
    padding.zero_();  // a hook has written there, or may take a norm
  }
  c10d::GradBucket grad_bucket(bucket, views_.size(), view.payload, view.offsets, view.lengths,
                               {view.sizes.begin(), view.sizes.end()}, view.parameters,
                               std::nullopt);
  promises_.push_back({bucket, hook_->runHook(grad_bucket)});
  promises_.back().future->addCallback(
      [on_completion = std::move(on_completion)](const auto& /*future*/) { on_completion(); });
}

void BucketHook::wait() {
  for (const Promise& promise : promises_) {
    promise.future->wait();
    const at::Tensor averaged = hook_->parseHookResult(promise.future->value());
    const View& view = views_[promise.bucket];
    if (averaged.const_data_ptr() == view.payload.const_data_ptr()) {
      continue;
    }
    if (averaged.numel() != view.payload.numel()) {
      throw InvalidUsage(join("the communication hook returned ", averaged.numel(),
                              " elements for ", view.label, ", which has ", view.payload.numel()));
    }
    view.payload.copy_(averaged.reshape(view.payload.sizes()));
  }
}

bool BucketHook::is_over() const {
  return std::all_of(promises_.begin(), promises_.end(),
                     [](const Promise& promise) { return promise.future->completed(); });
}

}  // namespace pydist
