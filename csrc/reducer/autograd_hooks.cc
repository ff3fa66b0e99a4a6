#include "reducer/autograd_hooks.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <memory>
#include <string_view>
#include <typeinfo>

#include "c10d/device_streams.h"

namespace pydist {
namespace {

using torch::autograd::variable_list;

class BeforeHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit BeforeHook(std::function<at::Tensor(const at::Tensor&)> hook) : hook_(std::move(hook)) {}

  variable_list operator()(const variable_list& gradients) override {
    variable_list replaced;
    replaced.reserve(gradients.size());
    for (const at::Tensor& gradient : gradients) {
      replaced.push_back(hook_(gradient));
    }
    return replaced;
  }

 private:
  std::function<at::Tensor(const at::Tensor&)> hook_;
};

class AfterHook final : public torch::autograd::FunctionPostHook {
 public:
  explicit AfterHook(std::function<void()> hook) : hook_(std::move(hook)) {}

  variable_list operator()(const variable_list& outputs, const variable_list& /*inputs*/) override {
    hook_();
    return outputs;
  }

 private:
  std::function<void()> hook_;
};

class NoticeHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit NoticeHook(std::function<void()> hook) : hook_(std::move(hook)) {}

  variable_list operator()(const variable_list& gradients) override {
    hook_();
    return gradients;
  }

 private:
  std::function<void()> hook_;
};

}  // namespace

AccumulationHooks::AccumulationHooks(const at::Tensor& leaf,
                                     std::function<at::Tensor(const at::Tensor&)> before,
                                     std::function<void()> after)
    : node_(torch::autograd::impl::grad_accumulator(leaf)) {
  auto hook = std::make_unique<BeforeHook>(std::move(before));
  before_ = hook.get();
  node_->add_pre_hook(std::move(hook));
  after_ = node_->add_post_hook(std::make_unique<AfterHook>(std::move(after)));
}

AccumulationHooks::~AccumulationHooks() {
  node_->del_post_hook(after_);
  auto& hooks = node_->pre_hooks();
  hooks.erase(std::remove_if(hooks.begin(), hooks.end(),
                             [this](const auto& hook) { return hook.get() == before_; }),
              hooks.end());
}

bool AccumulationHooks::are_in_place(const at::Tensor& leaf) const {
  return torch::autograd::impl::try_get_grad_accumulator(leaf) == node_;
}

bool AccumulationHooks::are_on_current_stream(const at::Tensor& leaf) const {
  return !leaf.is_cuda() ||
         node_->input_metadata(0).stream() == current_stream(device_of(leaf.device()));
}

bool AccumulationHooks::will_run() const {
  const auto* const chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) {
    return true;
  }
  const auto found = chosen->find(node_.get());
  return found != chosen->end() && found->second.needed_;
}

std::uint64_t next_node() { return at::sequence_number::peek(); }

void on_backward(const at::Tensor& tensor, std::uint64_t first_node, std::function<void()> hook) {
  // Before the user's hooks on the tensor, which may raise.
  if (tensor.is_view()) {
    const auto& behind = tensor._base().grad_fn();
    if (behind != nullptr && behind->sequence_nr() >= first_node) {
      behind->add_tensor_pre_hook(std::make_unique<NoticeHook>(hook));
    }
  }
  tensor.grad_fn()->add_tensor_pre_hook(std::make_unique<NoticeHook>(std::move(hook)));
}

bool may_run_program() {
  const auto held = torch::autograd::get_current_node();
  const torch::autograd::Node* const node = held.get();
  // Torch exports no type information of a function in Python, only its name in each object.
  if (node == nullptr || dynamic_cast<const torch::autograd::AccumulateGrad*>(node) != nullptr ||
      std::string_view(typeid(*node).name()) == "N5torch8autograd6PyNodeE") {
    return true;
  }
  const auto& before = held->tensor_pre_hooks();
  return !held->pre_hooks().empty() || !held->post_hooks().empty() ||
         !std::all_of(before.begin(), before.end(), [](const auto& hook) {
           return dynamic_cast<const NoticeHook*>(hook.get()) != nullptr;
         });
}

bool is_within_backward() {
  constexpr int kNone = -1;
  return torch::autograd::get_current_graph_task_id() != kNone;
}

void at_end_of_backward(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

}  // namespace pydist
