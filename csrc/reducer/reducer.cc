#include "reducer/reducer.h"

#include <ATen/ops/_sparse_coo_tensor_with_dims.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/max.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

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

// The words of a verdict.
constexpr float kFine = 0.0F;
constexpr float kHasThrown = 1.0F;
constexpr float kHookHasThrown = 2.0F;

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

// Begins a new round while operations of this one still write into the arena. So the gradients,
// which are worth nothing, are taken out of it: the next ones land there after drain().
void Reducer::orphan() {
  std::vector<WorkPtr> works = std::move(works_);
  std::vector<HookResult> results = std::move(hook_results_);
  restart();
  works_ = std::move(works);
  hook_results_ = std::move(results);
  for (GradientSlot& slot : plan_.slots) {
    slot.is_pending = false;
    slot.parameter.mutable_grad().reset();
  }
}

bool Reducer::is_over() const {
  return std::all_of(works_.begin(), works_.end(),
                     [](const WorkPtr& work) { return work->is_completed(); }) &&
         std::all_of(hook_results_.begin(), hook_results_.end(),
                     [](const HookResult& result) { return result.future->completed(); });
}

// -- the round

std::shared_ptr<Reducer::Backward> Reducer::begin(bool accumulates) {
  drain();
  if (is_enabled_ && (has_hook_thrown_ || !out_of_step_.empty())) {
    std::rethrow_exception(make_error(
        ErrorKind::kError,
        out_of_step_.empty() ? "the communication hook raised on this rank in an earlier backward, "
                               "so the hooks of the ranks are out of step: start again"
                             : out_of_step_));
  }
  auto backward = std::make_shared<Backward>(shared_from_this(), is_enabled_, accumulates);
  current_ = backward;
  at_end_of_backward([backward] { guarded_for_torch([&] { backward->finish(); }); });
  return backward;
}

void Reducer::drain() {
  if (works_.empty() && hook_results_.empty()) {
    return;
  }
  try {
    wait();
  } catch (...) {
    if (is_over()) {
      restart();
    }
    throw;
  }
  restart();
}

void Reducer::restart() {
  ++round_;
  launched_ = 0;
  fired_ = 0;
  has_verdict_ = false;
  sparse_done_ = 0;
  has_sent_buffers_ = false;
  works_.clear();
  hook_results_.clear();
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
  if (hook_ == nullptr) {
    submit(OpKind::kAllReduce, bucket.memory, bucket.label);
    return;
  }
  std::exception_ptr error;
  if (!has_hook_thrown_) {
    try {
      run_hook(launched_ - 1);
    } catch (...) {
      has_hook_thrown_ = true;
      error = std::current_exception();
    }
  }
  if (is_last) {
    submit(OpKind::kAllReduce, plan_.tail, "tail");
  }
  if (error != nullptr && !has_thrown) {
    std::rethrow_exception(error);
  }
}

void Reducer::set_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
  if (hook_ != nullptr) {
    throw InvalidUsage("a communication hook is registered already; there can be one only");
  }
  if (stats_.rounds != 0) {
    throw InvalidUsage("a communication hook is registered before the first backward");
  }
  for (const GradientBucket& bucket : plan_.buckets) {
    HookView& view = hook_views_.emplace_back();
    const bool is_last = &bucket == &plan_.buckets.back();
    view.payload = bucket.memory.narrow(
        0, 0, bucket.memory.numel() - (is_last ? plan_.tail.numel() : std::int64_t{0}));
    for (const std::size_t index : bucket.slots) {
      const GradientSlot& slot = plan_.slots[index];
      const std::int64_t offset = slot.view.storage_offset() * (slot.view.is_complex() ? 2 : 1) -
                                  bucket.memory.storage_offset();
      view.offsets.push_back(static_cast<std::size_t>(offset));
      view.lengths.push_back(slot.view.nbytes() / bucket.memory.itemsize());
      view.sizes.push_back(slot.view.sizes().vec());
      if (slot.view.is_complex()) {  // travels as pairs
        view.sizes.back().push_back(2);
      }
      view.parameters.push_back(slot.parameter);
    }
  }
  hook_ = std::move(hook);
}

void Reducer::run_hook(std::size_t bucket) {
  const Stopwatch stopwatch(stats_.wait_s);
  const HookView& view = hook_views_[bucket];
  c10d::GradBucket grad_bucket(bucket, plan_.buckets.size(), view.payload, view.offsets,
                               view.lengths, {view.sizes.begin(), view.sizes.end()},
                               view.parameters, std::nullopt);
  hook_results_.push_back({bucket, hook_->runHook(grad_bucket)});
}

void Reducer::launch_rest(bool has_thrown) {
  while (launched_ < plan_.buckets.size()) {
    launch(has_thrown);
  }
  if (!has_verdict_) {
    send_verdict(has_thrown);
  }
  launch_sparse(has_thrown);
  if (!has_sent_buffers_) {
    exchange_buffers(has_thrown);
  }
}

void Reducer::send_verdict(bool has_thrown) {
  has_verdict_ = true;
  if (!verdict_.defined()) {
    verdict_ = at::zeros({communicator_->size()}, at::kFloat);
  }
  verdict_.zero_();
  verdict_.mutable_data_ptr<float>()[communicator_->rank()] = has_hook_thrown_ ? kHookHasThrown
                                                              : has_thrown     ? kHasThrown
                                                                               : kFine;
  submit(OpKind::kAllReduce, verdict_, "verdict");
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

void Reducer::exchange_buffers(bool has_thrown) {
  has_sent_buffers_ = true;
  if (!buffers_) {
    return;
  }
  // The peers wait for the message whatever it holds.
  std::exception_ptr error;
  if (communicator_->rank() == 0 && !has_thrown) {
    try {
      buffers_->pack();
    } catch (...) {
      error = std::current_exception();
    }
  }
  submit(OpKind::kBroadcast, buffers_->memory, "buffers");
  if (error != nullptr) {
    std::rethrow_exception(error);
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

void Reducer::submit(OpKind kind, const at::Tensor& memory, std::string label) {
  const Stopwatch stopwatch(stats_.wait_s);
  DenseTensors tensors(DenseTensors::Lifetime::kHeld);
  Operation operation;
  operation.kind = kind;
  operation.label = std::move(label);
  if (kind == OpKind::kAllReduce) {
    operation.op = ReduceOp::kMean;
  }
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
  if (hook_results_.empty()) {
    return;
  }
  if (verdict_.max().item<float>() >= kHookHasThrown / static_cast<float>(communicator_->size())) {
    // Some rank's hook has not taken part, so what the others' wait for may never come.
    hook_results_.clear();
    return;
  }
  for (const HookResult& result : hook_results_) {
    result.future->wait();
    const at::Tensor averaged = hook_->parseHookResult(result.future->value());
    const at::Tensor& payload = hook_views_[result.bucket].payload;
    if (averaged.const_data_ptr() != payload.const_data_ptr()) {
      if (averaged.numel() != payload.numel()) {
        throw InvalidUsage(join("the communication hook returned ", averaged.numel(),
                                " elements for ", plan_.buckets[result.bucket].label,
                                ", which has ", payload.numel()));
      }
      payload.copy_(averaged.reshape(payload.sizes()));
    }
  }
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
    const float word = words[rank] * static_cast<float>(communicator_->size());  // of a mean
    if (word > 0.5F * kHasThrown) {
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
      is_hook = is_hook || word > 0.5F * (kHasThrown + kHookHasThrown);
    }
  }
  if (ranks.empty()) {
    return;
  }
  std::string message = join(
      "backward raised on rank ", ranks,
      ", so the gradients of this step are incomplete on every rank: the exception is there; ");
  if (is_hook) {
    message +=
        "it came out of the communication hook, so the hooks of the ranks are out of step: "
        "start again";
    out_of_step_ = message;
  } else {
    message += "set the gradients to zero before the next step";
  }
  std::rethrow_exception(make_error(ErrorKind::kError, message));
}

}  // namespace pydist
