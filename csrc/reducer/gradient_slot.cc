#include "reducer/gradient_slot.h"

#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include "base/error.h"

namespace pydist {
namespace {

std::string shape_of(const at::Tensor& tensor) {
  std::string text = "(";
  for (const std::int64_t extent : tensor.sizes()) {
    text += (text.size() == 1 ? "" : ", ") + std::to_string(extent);
  }
  return text + ")";
}

std::string dtype_name(const at::Tensor& tensor) {
  return join("torch.", c10::getDtypeNames(tensor.scalar_type()).first);
}

[[noreturn]] void throw_changed(const GradientSlot& slot, const at::Tensor& now) {
  throw InvalidUsage(join("parameter ", slot.name, " was ", shape_of(slot.view), " ",
                          dtype_name(slot.view),
                          " when pydist.DataParallel wrapped the module and is ", shape_of(now),
                          " ", dtype_name(now), " now: convert the module first, then wrap it"));
}

}  // namespace

bool holds_gradient(const GradientSlot& slot) {
  const at::Tensor& gradient = slot.parameter.grad();
  if (is_sparse(slot)) {
    return gradient.defined() && gradient.layout() == at::kSparse;
  }
  return gradient.defined() && gradient.layout() == at::kStrided &&
         gradient.scalar_type() == slot.view.scalar_type() &&
         gradient.const_data_ptr() == slot.view.const_data_ptr();
}

void expose(const GradientSlot& slot) { slot.parameter.mutable_grad() = slot.view.detach(); }

void adopt(const GradientSlot& slot) {
  const at::Tensor& gradient = slot.parameter.grad();
  if (is_sparse(slot)) {
    throw InvalidUsage(
        join("the gradient of parameter ", slot.name,
             " is dense, though an embedding with sparse=True has it: something else "
             "uses the parameter, too; build the embedding with sparse=False"));
  }
  if (gradient.layout() != at::kStrided) {
    throw InvalidUsage(join("the gradient of parameter ", slot.name,
                            " is sparse, which pydist.DataParallel expects of the weights of "
                            "nn.Embedding and nn.EmbeddingBag with sparse=True only"));
  }
  if (gradient.requires_grad()) {
    throw InvalidUsage(
        join("the gradient of parameter ", slot.name,
             " is part of a graph, which averaging over the ranks would cut: "
             "backward(create_graph=True) does not work through pydist.DataParallel; use "
             "torch.autograd.grad(..., create_graph=True) for the inner derivative and backward() "
             "for the loss"));
  }
  if (gradient.scalar_type() != slot.view.scalar_type() || gradient.sizes() != slot.view.sizes()) {
    throw_changed(slot, gradient);
  }
  const c10::AutoGradMode no_grad(false);
  slot.view.copy_(gradient);
  expose(slot);
}

at::Tensor land(const GradientSlot& slot, const at::Tensor& gradient) {
  if (is_sparse(slot) || !gradient.defined() || slot.parameter.grad().defined() ||
      c10::GradMode::is_enabled() || gradient.layout() != at::kStrided ||
      gradient.device() != slot.view.device() ||
      gradient.scalar_type() != slot.view.scalar_type() || gradient.sizes() != slot.view.sizes()) {
    return gradient;
  }
  slot.view.copy_(gradient);
  return slot.view.detach();
}

void require_unchanged(const GradientSlot& slot) {
  if (is_sparse(slot)) {
    return;
  }
  if (slot.parameter.scalar_type() != slot.view.scalar_type() ||
      slot.parameter.sizes() != slot.view.sizes()) {
    throw_changed(slot, slot.parameter);
  }
}

}  // namespace pydist
