// C++ hooks on autograd's nodes. They run on the thread that runs the node, without the GIL.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <functional>
#include <utility>

namespace pydist {

// A reference to a node that keeps it alive; torch 2.13 changed the kind.
using AutogradNode =
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

// Hooks on what accumulates a leaf's gradient; they go with this object. It keeps the node alive,
// which the tensor itself does not.
class AccumulationHooks {
 public:
  // `before` may replace the gradient on its way into `.grad`; `after` runs once it is there.
  AccumulationHooks(const at::Tensor& leaf, std::function<at::Tensor(const at::Tensor&)> before,
                    std::function<void()> after);
  AccumulationHooks(const AccumulationHooks&) = delete;
  AccumulationHooks& operator=(const AccumulationHooks&) = delete;
  ~AccumulationHooks();

  // Whether it is still these hooks' node that accumulates the leaf's gradient.
  [[nodiscard]] bool are_in_place(const at::Tensor& leaf) const;

  // Whether the node works on the stream that is current on the leaf's device: the one that was
  // when it was made.
  [[nodiscard]] bool are_on_current_stream(const at::Tensor& leaf) const;

  // Whether the backward that runs on this thread will accumulate this leaf's gradient: a
  // backward() does, unless its `inputs` leave the leaf out, and autograd.grad() does not.
  [[nodiscard]] bool will_run() const;

 private:
  AutogradNode node_;
  const void* before_ = nullptr;
  std::uintptr_t after_ = 0;
};

// The number of the next node of the graph that this thread makes.
[[nodiscard]] std::uint64_t next_node();

// Calls `hook` when a backward reaches the tensor, which is not a leaf. Stays as long as the graph.
// A change in place gives a view a new node, which this hook does not sit on. So for a view it also
// sits on what it is a view of, if that was made by a node with this number or a later one.
void on_backward(const at::Tensor& tensor, std::uint64_t first_node, std::function<void()> hook);

// Whether the node that this thread evaluates may run code of the program: hooks, or a function in
// Python. What accumulates a leaf's gradient counts as such a node, and so does none.
[[nodiscard]] bool may_run_program();

// Whether this thread runs a part of a backward.
[[nodiscard]] bool is_within_backward();

// Calls `callback` at the end of the backward that runs on this thread. Dropped without a call
// where that backward throws.
void at_end_of_backward(std::function<void()> callback);

}  // namespace pydist
