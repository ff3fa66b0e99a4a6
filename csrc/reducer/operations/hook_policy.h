// torch's communication hooks in place of the all-reduce of a bucket.
//
// A hook sees complex gradients as pairs of real numbers. It is called in the order of the buckets;
// for one thread at a time.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "reducer/gradients/gradient_arena.h"

namespace c10d {
class CommHookInterface;
}

namespace pydist {

class BucketHook {
 public:
  BucketHook(std::shared_ptr<c10d::CommHookInterface> hook, const GradientArena& arena);

  // After the arena was arranged anew, while nothing is under way.
  void adapt(const GradientArena& arena);

  // Lets the hook start on what a bucket sends in `memory`; throws what it throws. `on_completion`
  // is called when it has finished, on any thread.
  void start(std::size_t bucket, const at::Tensor& memory, std::function<void()> on_completion);

  // Waits for everything that was started, and writes what comes of it into the memory.
  void wait();

  // Drops what was started, finished or not.
  void forget() noexcept { promises_.clear(); }

  [[nodiscard]] bool is_idle() const noexcept { return promises_.empty(); }
  // Whether everything that was started has finished.
  [[nodiscard]] bool is_over() const;

 private:
  struct View {
    std::string label;
    std::vector<std::size_t> offsets;  // of each slot in the memory, in its elements
    std::vector<std::size_t> lengths;
    std::vector<std::vector<std::int64_t>> sizes;
    std::vector<at::Tensor> parameters;
    std::vector<std::pair<std::int64_t, std::int64_t>> padding;  // between gradients: from, count
  };
  struct Promise {
    std::size_t bucket;
    at::Tensor memory;
    c10::intrusive_ptr<c10::ivalue::Future> future;
  };

  const std::shared_ptr<c10d::CommHookInterface> hook_;
  std::vector<View> views_;
  std::vector<Promise> promises_;
};

}  // namespace pydist
