// Averages the gradients of a module over the ranks while backward still runs.
//
// A bucket of the arena is all-reduced, asynchronously, as soon as it and all buckets before it are
// complete; the end of backward launches what is left and waits for everything. Everything happens
// on the thread that runs backward, without the GIL.
//
// Note [A backward, not a forward]
// A synchronisation belongs to one outermost backward. A hook on the outputs of forward announces
// it, because such a hook runs in the outermost graph task, also where all parameters get their
// gradients in reentrant ones (activation checkpointing). The engine's end-of-backward callback is
// queued there; it owns the Backward object, so that object dies without having been finished
// exactly when a backward has thrown. Where nothing announced it (the loss did not come from the
// outputs of forward), the first parameter does; a nested graph task may then be synchronised
// before the outer one, and what comes later goes in a second round. That costs time and changes
// nothing: averaging what is already the same on all ranks leaves it as it is.
//
// Note [The tail]
// The last bucket to be launched carries one word for each parameter, "this rank has a gradient
// here". Every rank launches every bucket in every round, with zeros where it has nothing, so ranks
// that use different parameters never wait for each other; a parameter that no rank used keeps the
// gradient that it had. Whether a backward has thrown is known at its end only: a small all-reduce
// of its own, after the last bucket, carries that.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "communicator/communicator.h"
#include "reducer/autograd_hooks.h"
#include "reducer/bucket_hook.h"
#include "reducer/reduction_plan.h"

namespace pydist {

// Copies rank 0's buffers to the others at the end of each round.
struct BufferExchange {
  at::Tensor memory;             // of bytes
  std::function<void()> pack;    // on rank 0: writes the buffers into `memory`
  std::function<void()> unpack;  // on the others: takes them over
};

// What synchronising gradients has cost since the last reset.
struct ReducerStats {
  std::int64_t rounds = 0;
  std::int64_t bytes = 0;
  double wait_s = 0.0;  // spent launching and waiting: what backward did not hide
};

// For one backward at a time, as the gradients themselves are.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  // Every rank of the communicator makes one, from the same plan.
  [[nodiscard]] static std::shared_ptr<Reducer> create(CommunicatorPtr communicator,
                                                       ReductionPlan plan,
                                                       std::optional<BufferExchange> buffers);
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Before a forward: waits for what a backward that threw has left under way, and throws
  // InvalidUsage where a parameter has changed its type.
  void prepare_forward();

  // Announces the backward that will start from an output of forward; see
  // Note [A backward, not a forward]. Tensors that are not part of a graph are left alone.
  void watch(const at::Tensor& output);

  // Lets `hook` average the buckets instead of an all-reduce of the communicator's. The words of
  // the tail still travel on the communicator, and so do sparse gradients. Once, before the first
  // backward.
  void set_hook(std::shared_ptr<c10d::CommHookInterface> hook);

  // Whether backwards that begin from now on are synchronised, or accumulate only.
  void set_enabled(bool enabled) noexcept { is_enabled_ = enabled; }
  [[nodiscard]] bool is_enabled() const noexcept { return is_enabled_; }

  [[nodiscard]] const ReducerStats& stats() const noexcept { return stats_; }
  void reset_stats() noexcept { stats_ = {}; }

 private:
  class Backward;
  // A parameter without a gradient of its own in this round.
  struct Absent {
    std::size_t slot;
    at::Tensor before;  // what to put back if no rank used the parameter; undefined: nothing
  };

  Reducer(CommunicatorPtr communicator, ReductionPlan plan, std::optional<BufferExchange> buffers);
  void install_hooks();

  // -- what the hooks call
  std::shared_ptr<Backward> require_backward();
  void announce();
  [[nodiscard]] at::Tensor arriving(std::size_t index, const at::Tensor& gradient);
  void accumulated(std::size_t index);
  void finish(const Backward& backward);
  void abandon(const Backward& backward) noexcept;

  // -- the round
  std::shared_ptr<Backward> begin(bool accumulates);
  [[nodiscard]] bool is_concerned(const Backward& backward) const;
  void drain();
  void restart();
  void launch(bool has_thrown);
  // Goes on where it was left, if anything threw.
  void launch_rest(bool has_thrown);
  void send_verdict(bool has_thrown);
  void launch_sparse(bool has_thrown);
  void exchange_buffers();
  [[nodiscard]] at::Tensor fill_absent(GradientSlot& slot);
  void write_tail();
  void submit(OpKind kind, ReduceOp op, const at::Tensor& memory, std::string label);
  void wait();
  void settle();
  void require_verdict();
  // -- what is under way
  [[nodiscard]] bool is_idle() const;
  [[nodiscard]] bool is_over() const;
  void forget();
  void orphan();

  const CommunicatorPtr communicator_;
  ReductionPlan plan_;
  const std::optional<BufferExchange> buffers_;
  std::vector<AccumulationHooks> hooks_;
  bool is_enabled_ = true;
  std::weak_ptr<Backward> current_;
  std::uint64_t round_ = 0;
  std::size_t launched_ = 0;     // buckets of this round
  std::size_t fired_ = 0;        // parameters of this round
  bool has_verdict_ = false;     // has been sent
  std::size_t sparse_done_ = 0;  // slots looked at by launch_sparse()
  bool has_sent_buffers_ = false;
  at::Tensor verdict_;       // a word for each rank
  std::string out_of_step_;  // why nothing more can be averaged
  std::vector<WorkPtr> works_;
  std::optional<BucketHook> hook_;
  std::vector<Absent> absent_;
  // What this rank contributes of gradients that it does not have, and then the mean.
  std::vector<std::pair<std::size_t, at::Tensor>> sparse_absent_;
  ReducerStats stats_;
};

}  // namespace pydist
