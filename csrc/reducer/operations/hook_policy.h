// The policy of a reducer with one of torch's communication hooks, which makes what a bucket's
// gradients become.
//
// A hook sees complex gradients as pairs of real numbers. It returns the mean over the ranks, or,
// where the reducer sums, the sum. Where ranks count by share, each rank's gradients are multiplied
// first, so that this mean or sum is the weighted one.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "reducer/operations/bucket_policy.h"

namespace c10d {
class CommHookInterface;
class GradBucket;
}  // namespace c10d

namespace pydist {

class HookPolicy final : public BucketPolicy {
 public:
  // `arena` stays, and is packed. `divisor` is what the hook divides the sum over the ranks by:
  // their number, or 1.
  HookPolicy(std::shared_ptr<c10d::CommHookInterface> hook, int divisor,
             const GradientArena& arena);

  void prepare(const DepartingBucket& bucket, const Combination& combination) override;
  // Throws what the hook throws.
  [[nodiscard]] WorkPtr reduce(const DepartingBucket& bucket, const Combination& combination,
                               Work::Callback on_completion) override;
  [[nodiscard]] at::Tensor reduce_sparse(const GradientSlot& slot, const at::Tensor& gradient,
                                         const Combination& combination) override;
  void finish() override;
  void forget() noexcept override { promises_.clear(); }
  [[nodiscard]] bool is_idle() const noexcept override { return promises_.empty(); }
  [[nodiscard]] bool is_over() const override;
  void adapt(const GradientArena& arena) override;
  [[nodiscard]] bool is_of_program() const noexcept override { return true; }
  [[nodiscard]] bool has_raised() const noexcept override { return has_raised_; }

 private:
  struct View {
    std::string label;
    std::vector<std::size_t> offsets;  // of each slot in the memory, in its elements
    std::vector<std::size_t> lengths;
    std::vector<std::vector<std::int64_t>> sizes;
    std::vector<at::Tensor> parameters;
  };
  struct Promise {
    std::string label;
    at::Tensor memory;  // sparse, or of a bucket
    c10::intrusive_ptr<c10::ivalue::Future> future;
  };

  // The last ones are those of sparse gradients.
  [[nodiscard]] std::size_t bucket_count() const;
  void run(c10d::GradBucket& bucket, std::string label, const at::Tensor& memory);

  const GradientArena& arena_;
  const std::shared_ptr<c10d::CommHookInterface> hook_;
  const int divisor_;
  std::vector<View> views_;
  std::vector<Promise> promises_;
  bool has_raised_ = false;
};

}  // namespace pydist
