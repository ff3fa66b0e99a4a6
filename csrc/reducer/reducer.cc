#include "reducer/reducer.h"

#include <ATen/ops/_sparse_coo_tensor_with_dims.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/max.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "base/error.h"
#include "c10d/errors.h"
#include "c10d/sparse_all_reduce.h"
#include "c10d/tensors.h"
#include "c10d/work.h"

namespace pydist {
namespace {

// The words of a verdict; zero where all is well.
constexpr float kHasThrown = 1.0F;
constexpr float kHookHasThrown = 2.0F;

constexpr const char* kHooksOutOfStep =
    "a communication hook raised, so the hooks of the ranks are out of step: start again";

constexpr std::uint64_t kFirstRound = 1;

class Stopwatch {
 public:
  explicit Stopwatch(double& total_s) : total_s_(total_s) {}
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() { total_s_ += std::chrono::duration<double>(Clock::now() - begin_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  double& total_s_;
  const Clock::time_point begin_ = Clock::now();
};

}  // namespace

// One outermost backward; only the engine's callback keeps it alive.
class Reducer::Backward {
 public:
  Backward(std::shared_ptr<Reducer> owner, bool synchronizes, bool accumulates)
      : synchronizes(synchronizes), accumulates(accumulates), owner_(std::move(owner)) {}
  Backward(const Backward&) = delete;
  Backward& operator=(const Backward&) = delete;
  ~Backward() {
    if (!is_finished_) {
      owner_->abandon(*this);
    }
  }

  void finish() {
    is_finished_ = true;
    owner_->finish(*this);
  }

  const bool synchronizes;
  // Known to be a backward() that fills gradients, even where it reaches no parameter.
  const bool accumulates;

 private:
  const std::shared_ptr<Reducer> owner_;
  bool is_finished_ = false;
};

std::shared_ptr<Reducer> Reducer::create(CommunicatorPtr communicator, ReductionPlan plan,
                                         std::optional<BufferExchange> buffers) {
  std::shared_ptr<Reducer> reducer(
      new Reducer(std::move(communicator), std::move(plan), std::move(buffers)));
  reducer->install_hooks();
  return reducer;
}

Reducer::Reducer(CommunicatorPtr communicator, ReductionPlan plan,
                 std::optional<BufferExchange> buffers)
    : communicator_(std::move(communicator)), plan_(std::move(plan)), buffers_(std::move(buffers)) {
  for (GradientSlot& slot : plan_.slots) {
    slot.bucket = plan_.buckets.size() - 1;
  }
  for (std::size_t number = 0; number < plan_.buckets.size(); ++number) {
    for (const std::size_t index : plan_.buckets[number].slots) {
      plan_.slots.at(index).bucket = number;
    }
  }
  restart();
}

void Reducer::install_hooks() {
  // The hooks live as long as the parameters; they must not keep the rest alive.
  const std::weak_ptr<Reducer> weak = weak_from_this();
  hooks_.reserve(plan_.slots.size());
  for (const GradientSlot& slot : plan_.slots) {
    hooks_.emplace_back(
        slot.parameter,
        [weak, index = slot.index](const at::Tensor& gradient) {
          const auto self = weak.lock();
          return self == nullptr
                     ? gradient
                     : guarded_for_torch([&] { return self->arriving(index, gradient); });
        },
        [weak, index = slot.index] {
          if (const auto self = weak.lock()) {
            guarded_for_torch([&] { self->accumulated(index); });
          }
        });
  }
}

// -- what the hooks call

void Reducer::watch(const at::Tensor& output) {
  if (!output.requires_grad() || output.is_leaf()) {
    return;
  }
  // The graph keeps the reducer: who drops the wrapper after forward still gets averaged gradients.
  on_backward(output,
              [self = shared_from_this()] { guarded_for_torch([&] { self->announce(); }); });
}

void Reducer::prepare_forward() {
  if (current_.expired()) {
    drain();
  }
  for (const GradientSlot& slot : plan_.slots) {
    require_unchanged(slot);
  }
}

void Reducer::announce() {
  if (current_.expired()) {
    begin(std::any_of(hooks_.begin(), hooks_.end(),
                      [](const AccumulationHooks& hooks) { return hooks.will_run(); }));
  }
}

std::shared_ptr<Reducer::Backward> Reducer::require_backward() {
  auto backward = current_.lock();
  return backward != nullptr ? backward : begin(/*accumulates=*/true);
}

at::Tensor Reducer::arriving(std::size_t index, const at::Tensor& gradient) {
  // Nothing may write into the arena while an earlier round is under way.
  require_backward();
  plan_.slots[index].has_arrived = gradient.defined();
  return land(plan_.slots[index], gradient);
}

void Reducer::accumulated(std::size_t index) {
  const std::shared_ptr<Backward> backward = require_backward();
  GradientSlot& slot = plan_.slots[index];
  const bool is_late = slot.fired_in == round_;
  if (is_late && slot.bucket < launched_) {
    throw InvalidUsage(
        join("parameter ", slot.name,
             " received a second gradient within one backward, after its bucket was sent: it is "
             "shared by several reentrant activation checkpoints, or by one and the model outside; "
             "pass use_reentrant=False to torch.utils.checkpoint.checkpoint"));
  }
  if (!slot.parameter.grad().defined()) {
    if (slot.has_arrived && backward->synchronizes) {
      throw InvalidUsage(join("the gradient of parameter ", slot.name,
                              " was taken away by a hook before it could be averaged: step the "
                              "optimizer after backward(), not in a hook of the parameter"));
    }
    return;
  }
  if (!holds_gradient(slot)) {
    adopt(slot);
  }
  slot.is_pending = true;
  if (is_late || !backward->synchronizes) {
    return;
  }
  slot.fired_in = round_;
  ++fired_;
  --plan_.buckets[slot.bucket].missing;
  while (launched_ < plan_.buckets.size() && plan_.buckets[launched_].missing == 0) {
    launch(/*has_thrown=*/false);
  }
}

bool Reducer::is_concerned(const Backward& backward) const {
  return backward.synchronizes && (fired_ != 0 || backward.accumulates);
}

void Reducer::finish(const Backward& backward) {
  current_.reset();
  const bool trains = std::any_of(plan_.slots.begin(), plan_.slots.end(),
                                  [](const auto& slot) { return slot.parameter.requires_grad(); });
  if (!is_concerned(backward) || !trains) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  try {
    launch_rest(/*has_thrown=*/false);
  } catch (...) {
    abandon(backward);
    throw;
  }
  try {
    wait();
    settle();
  } catch (...) {
    if (is_over()) {
      forget();
      restart();
    } else {
      // Interrupted. The peers will have their average and go on with it.
      out_of_step_ =
          "the wait for averaged gradients was cut short in an earlier backward, so this rank's "
          "model may differ from the others': load a checkpoint on all ranks, and wrap the module "
          "anew";
      orphan();
    }
    throw;
  }
  forget();
  restart();
}

// Keeps the ranks in step after a backward that threw here. The peers are in the same round or will
// be: they get everything they wait for, and are told that it is worth nothing.
void Reducer::abandon(const Backward& backward) noexcept {
  current_.reset();
  if (!is_concerned(backward)) {
    return;
  }
  try {
    const c10::AutoGradMode no_grad(false);
    launch_rest(/*has_thrown=*/true);
  } catch (const std::exception&) {
    // A group that failed has told everybody already; the caller sees the error of the backward.
  }
  orphan();
}

// -- the round

std::shared_ptr<Reducer::Backward> Reducer::begin(bool accumulates) {
  drain();
  if (is_enabled_ && !out_of_step_.empty()) {
    std::rethrow_exception(make_error(ErrorKind::kError, out_of_step_));
  }
  auto backward = std::make_shared<Backward>(shared_from_this(), is_enabled_, accumulates);
  current_ = backward;
  at_end_of_backward([backward] { guarded_for_torch([&] { backward->finish(); }); });
  return backward;
}

// Waits for what an earlier round has left under way.
void Reducer::drain() {
  if (is_idle()) {
    return;
  }
  try {
    wait();
  } catch (...) {
    if (is_over()) {
      forget();
    }
    throw;
  }
  forget();
}

void Reducer::restart() {
  ++round_;
  launched_ = 0;
  fired_ = 0;
  has_verdict_ = false;
  sparse_done_ = 0;
  has_sent_buffers_ = false;
  absent_.clear();
  sparse_absent_.clear();
  for (GradientBucket& bucket : plan_.buckets) {
    bucket.missing = 0;
  }
  for (const GradientSlot& slot : plan_.slots) {
    ++plan_.buckets[slot.bucket].missing;
  }
}

void Reducer::launch(bool has_thrown) {
  const c10::AutoGradMode no_grad(false);
  GradientBucket& bucket = plan_.buckets[launched_];
  if (!has_thrown) {  // otherwise nobody looks at the values
    for (const std::size_t index : bucket.slots) {
      GradientSlot& slot = plan_.slots[index];
      if (!slot.is_pending || !slot.parameter.grad().defined()) {
        absent_.push_back({index, fill_absent(slot)});
      } else if (!holds_gradient(slot)) {
        adopt(slot);  // somebody has moved it meanwhile
      }
    }
  }
  ++launched_;
  const bool is_last = launched_ == plan_.buckets.size();
  if (is_last) {
    write_tail();
  }
  if (!hook_) {
    submit(OpKind::kAllReduce, ReduceOp::kMean, bucket.memory, bucket.label);
    return;
  }
  std::exception_ptr error;
  if (out_of_step_.empty()) {
    const Stopwatch stopwatch(stats_.wait_s);
    try {
      hook_->start(launched_ - 1);
    } catch (...) {
      out_of_step_ = kHooksOutOfStep;
      error = std::current_exception();
    }
  }
  if (is_last) {
    submit(OpKind::kAllReduce, ReduceOp::kMean, plan_.tail, "tail");
  }
  if (error != nullptr && !has_thrown) {
    std::rethrow_exception(error);
  }
}

void Reducer::set_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
  if (hook_) {
    throw InvalidUsage("a communication hook is registered already; there can be one only");
  }
  if (round_ != kFirstRound) {
    throw InvalidUsage("a communication hook is registered before the first backward");
  }
  hook_.emplace(std::move(hook), plan_);
}

void Reducer::launch_rest(bool has_thrown) {
  while (launched_ < plan_.buckets.size()) {
    launch(has_thrown);
  }
  if (!has_verdict_) {
    // Before the verdict, since it may throw.
    if (buffers_ && communicator_->rank() == 0 && !has_thrown) {
      buffers_->pack();
    }
    send_verdict(has_thrown);
  }
  launch_sparse(has_thrown);
  if (!has_sent_buffers_) {
    exchange_buffers();
  }
}

void Reducer::send_verdict(bool has_thrown) {
  has_verdict_ = true;
  if (!verdict_.defined()) {
    verdict_ = at::zeros({communicator_->size()}, at::kFloat);
  }
  verdict_.zero_();
  if (has_thrown) {
    verdict_.mutable_data_ptr<float>()[communicator_->rank()] =
        out_of_step_.empty() ? kHasThrown : kHookHasThrown;
  }
  submit(OpKind::kAllReduce, ReduceOp::kSum, verdict_, "verdict");
}

void Reducer::launch_sparse(bool has_thrown) {
  while (sparse_done_ < plan_.slots.size()) {
    GradientSlot& slot = plan_.slots[sparse_done_++];
    if (!is_sparse(slot)) {
      continue;
    }
    at::Tensor gradient = slot.parameter.grad();
    if (has_thrown || !holds_gradient(slot)) {
      gradient = at::_sparse_coo_tensor_with_dims(
          /*sparse_dim=*/1, slot.parameter.dim() - 1, slot.parameter.sizes(),
          slot.parameter.options().layout(at::kSparse));
      sparse_absent_.emplace_back(slot.index, gradient);
    } else if (!slot.is_pending) {
      // What an earlier round has left: it counts if another rank adds to it, as in fill_absent().
      gradient = gradient.clone();
      sparse_absent_.emplace_back(slot.index, gradient);
    }
    const Stopwatch stopwatch(stats_.wait_s);
    works_.push_back(
        sparse_all_reduce(*communicator_, gradient, ReduceOp::kMean, /*deadline=*/std::nullopt));
  }
}

void Reducer::exchange_buffers() {
  has_sent_buffers_ = true;
  if (buffers_) {
    submit(OpKind::kBroadcast, ReduceOp::kSum, buffers_->memory, "buffers");
  }
}

// Gives the slot of a parameter that this backward did not reach a value to send, and returns what
// to put back if no other rank reached it either.
at::Tensor Reducer::fill_absent(GradientSlot& slot) {
  if (!slot.parameter.grad().defined()) {
    slot.view.zero_();
    return {};
  }
  if (!holds_gradient(slot)) {
    adopt(slot);
  }
  return slot.view.clone();
}

void Reducer::write_tail() {
  std::vector<float> words(plan_.slots.size(), 1.0F);
  for (const Absent& absent : absent_) {
    words[absent.slot] = 0.0F;
  }
  for (const GradientSlot& slot : plan_.slots) {
    if (is_sparse(slot) && !(slot.is_pending && holds_gradient(slot))) {
      words[slot.index] = 0.0F;
    }
  }
  plan_.tail.copy_(
      at::from_blob(words.data(), {static_cast<std::int64_t>(words.size())}, at::kFloat));
}

void Reducer::submit(OpKind kind, ReduceOp op, const at::Tensor& memory, std::string label) {
  const Stopwatch stopwatch(stats_.wait_s);
  DenseTensors tensors(DenseTensors::Lifetime::kHeld);
  Operation operation;
  operation.kind = kind;
  operation.op = op;
  operation.label = std::move(label);
  if (kind == OpKind::kAllReduce || communicator_->rank() == operation.peer) {
    operation.inputs = {tensors.input(memory)};
  }
  if (kind == OpKind::kAllReduce || communicator_->rank() != operation.peer) {
    operation.outputs = {tensors.output(memory)};
  }
  works_.push_back(with_tensors(communicator_->submit(std::move(operation)), std::move(tensors)));
}

void Reducer::wait() {
  const Stopwatch stopwatch(stats_.wait_s);
  for (const WorkPtr& work : works_) {
    work->wait();
  }
  if (!hook_ || hook_->is_idle()) {
    return;
  }
  if (verdict_.max().item<float>() == kHookHasThrown) {
    // Some rank's hook has not taken part, so what the others' wait for may never come.
    hook_->forget();
    return;
  }
  hook_->wait();
}

// Draws the conclusions from a round that is complete.
void Reducer::settle() {
  for (GradientSlot& slot : plan_.slots) {
    slot.is_pending = false;
  }
  ++stats_.rounds;
  for (const GradientBucket& bucket : plan_.buckets) {
    stats_.bytes += static_cast<std::int64_t>(bucket.memory.nbytes());
  }
  require_verdict();
  const at::Tensor tail = plan_.tail.to(at::kFloat).contiguous();
  const float* const words = tail.const_data_ptr<float>();
  for (const Absent& absent : absent_) {
    GradientSlot& slot = plan_.slots[absent.slot];
    if (words[absent.slot] > 0) {
      if (!holds_gradient(slot)) {
        expose(slot);
      }
    } else if (absent.before.defined()) {
      slot.view.copy_(absent.before);
    }
  }
  for (const auto& [index, mean] : sparse_absent_) {
    if (words[index] > 0) {
      plan_.slots[index].parameter.mutable_grad() = mean;
    }
  }
  if (buffers_ && communicator_->rank() != 0) {
    buffers_->unpack();
  }
}

// Throws where a backward has thrown on any rank.
void Reducer::require_verdict() {
  const float* const words = verdict_.const_data_ptr<float>();
  std::string ranks;
  bool is_hook = false;
  for (int rank = 0; rank < communicator_->size(); ++rank) {
    if (words[rank] != 0) {
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
      is_hook = is_hook || words[rank] == kHookHasThrown;
    }
  }
  if (ranks.empty()) {
    return;
  }
  if (is_hook) {
    out_of_step_ = kHooksOutOfStep;
  }
  const std::string message =
      join("backward raised on rank ", ranks,
           ", so the gradients of this step are incomplete on every rank: the exception is there; ",
           is_hook ? out_of_step_ : "set the gradients to zero before the next step");
  std::rethrow_exception(make_error(ErrorKind::kError, message));
}

// -- what is under way

bool Reducer::is_idle() const { return works_.empty() && (!hook_ || hook_->is_idle()); }

bool Reducer::is_over() const {
  return std::all_of(works_.begin(), works_.end(),
                     [](const WorkPtr& work) { return work->is_completed(); }) &&
         (!hook_ || hook_->is_over());
}

void Reducer::forget() {
  works_.clear();
  if (hook_) {
    hook_->forget();
  }
}

// Begins a new round while operations of this one still write into the arena. So the gradients,
// which are worth nothing, are taken out of it: the next ones land there after drain().
void Reducer::orphan() {
  restart();
  for (GradientSlot& slot : plan_.slots) {
    slot.is_pending = false;
    slot.parameter.mutable_grad().reset();
  }
}

}  // namespace pydist
