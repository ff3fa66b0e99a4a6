#include "reducer/gradients/gradient_slot.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/isclose.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>

#include "base/error.h"
#include "c10d/device_streams.h"
#include "reducer/gradients/gradient_shard.h"
#include "reducer/gradients/plain_copy.h"

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
  std::string before = join(shape_of(slot.view), " ", dtype_name(slot.view));
  std::string after = join(shape_of(now), " ", dtype_name(now));
  if (now.device() != slot.view.device()) {
    before += " on " + slot.view.device().str();
    after += " on " + now.device().str();
  }
  throw InvalidUsage(join("parameter ", slot.name, " was ", before,
                          " when pydist.DataParallel wrapped the module and is ", after,
                          " now: convert or move the module first, then wrap it"));
}

}  // namespace

std::int64_t real_count(const at::Tensor& parameter) {
  return parameter.numel() * (parameter.is_complex() ? 2 : 1);
}

at::Tensor shaped(const GradientSlot& slot, const at::Tensor& flat) {
  const at::Tensor& parameter = slot.parameter;
  const at::Tensor elements =
      parameter.is_complex() ? at::view_as_complex(flat.view({parameter.numel(), 2})) : flat;
  // With a version of its own, which tells whether somebody has written into the slot.
  return elements.as_strided(parameter.sizes(), slot.strides).variable_data();
}

bool holds_gradient(const GradientSlot& slot) {
  const at::Tensor& gradient = slot.parameter.grad();
  if (!has_place(slot) || !slot.is_bound) {
    return gradient.defined() && (gradient.layout() == at::kSparse) == slot.is_sparse &&
           !shows_shard(slot);
  }
  return gradient.defined() && gradient.layout() == at::kStrided &&
         gradient.scalar_type() == slot.view.scalar_type() &&
         gradient.const_data_ptr() == slot.view.const_data_ptr();
}

void expose(const GradientSlot& slot) { slot.parameter.mutable_grad() = slot.view.variable_data(); }

bool fits(const GradientSlot& slot) {
  const at::Tensor& gradient = slot.parameter.grad();
  const at::Tensor& like = has_place(slot) ? slot.view : slot.parameter;
  return gradient.scalar_type() == like.scalar_type() && gradient.sizes() == like.sizes() &&
         gradient.device() == like.device();
}

void require_fitting(const GradientSlot& slot) {
  const at::Tensor& gradient = slot.parameter.grad();
  if (slot.is_sparse) {
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
  if (!fits(slot)) {
    throw_changed(slot, gradient);
  }
}

void throw_replaced(const GradientSlot& slot) {
  throw InvalidUsage(
      join("the gradient of parameter ", slot.name,
           " was replaced between backward passes with weights, so how much it counts cannot be "
           "known: change it in place, or after averaging; to put another in its place, call "
           "sync_gradients() after zero_grad() first"));
}

void throw_taken_away(const GradientSlot& slot) {
  if (!slot.parameter.requires_grad()) {
    throw InvalidUsage(join("parameter ", slot.name,
                            " was frozen (requires_grad_(False)) between a forward and its "
                            "backward: freeze it before the forward, or after the backward"));
  }
  throw InvalidUsage(join("the gradient of parameter ", slot.name,
                          " was taken away by a hook before it could be averaged: step the "
                          "optimizer after backward(), not in a hook of the parameter"));
}

void adopt(const GradientSlot& slot) {
  require_fitting(slot);
  const at::Tensor& gradient = slot.parameter.grad();
  const c10::AutoGradMode no_grad(false);
  slot.view.copy_(gradient);
  if (!gradient.is_cpu()) {
    // It may have come on another stream, whose memory it gives back now.
    gradient.record_stream(current_stream(device_of(gradient.device())));
  }
  expose(slot);
}

at::Tensor land(const GradientSlot& slot, const at::Tensor& gradient, const Factor& factor) {
  if (!has_place(slot) || !slot.is_bound || slot.landing != 0 || !gradient.defined() ||
      slot.parameter.grad().defined() || c10::GradMode::is_enabled() ||
      gradient.layout() != at::kStrided || gradient.device() != slot.view.device() ||
      gradient.scalar_type() != slot.view.scalar_type() || gradient.sizes() != slot.view.sizes()) {
    return scaled(gradient, factor);
  }
  // Nothing here is for autograd, which would take as long as the rest.
  const at::AutoDispatchBelowADInplaceOrView guard;
  if (factor.on_device || factor.number == 1.0) {
    const at::Tensor counted = scaled(gradient, factor);
    const bool is_there = counted.const_data_ptr() == slot.view.const_data_ptr();
    if (!is_there && !try_plain_copy(slot.view, counted)) {
      slot.view.copy_(counted);
    }
  } else if (factor.number == 0.0) {
    slot.view.zero_();
  } else {
    at::Tensor view = slot.view;
    at::mul_out(view, gradient, at::scalar_tensor(factor.number, at::kDouble));
  }
  return slot.view.variable_data();
}

bool is_averaged(const GradientSlot& slot) {
  if (slot.is_pending) {
    return false;
  }
  if (is_sharded(slot)) {
    return shows_shard(slot);
  }
  // Converting the module moves what was seen; who holds the slot's memory may have wrapped it
  // anew.
  return is_seen(slot) || (has_place(slot) && holds_gradient(slot));
}

bool is_by_hand(const GradientSlot& slot) {
  return slot.parameter.grad().defined() && !slot.is_pending && !is_averaged(slot);
}

void set_aside(GradientSlot& slot) {
  at::Tensor& gradient = slot.parameter.mutable_grad();
  if (!is_sharded(slot) && has_place(slot)) {
    slot.aside = gradient.clone();
    gradient.zero_();
    return;
  }
  slot.aside = is_sharded(slot) ? slot.segment.clone() : gradient;
  gradient.reset();
}

void put_back(GradientSlot& slot) {
  if (!slot.aside.defined()) {
    return;
  }
  at::Tensor& gradient = slot.parameter.mutable_grad();
  if (is_sharded(slot)) {
    if (gradient.defined()) {
      slot.segment.add_(slot.aside);
    } else {
      slot.segment.copy_(slot.aside);
    }
    gradient = slot.shown;
  } else if (!gradient.defined()) {
    if (has_place(slot)) {
      slot.view.copy_(slot.aside);
      expose(slot);
    } else {
      gradient = slot.aside;
    }
  } else if (has_place(slot)) {
    slot.view.add_(slot.aside);
  } else {
    gradient = gradient.add(slot.aside);
  }
  slot.aside.reset();
}

void note_seen(GradientSlot& slot, bool by_value) {
  const at::Tensor& gradient = slot.parameter.grad();
  slot.seen = gradient.getIntrusivePtr();
  slot.seen_version = gradient.defined() ? gradient._version() : 0;
  const bool has_one_of_its_own =
      !gradient.defined() || gradient.unsafeGetTensorImpl()->unique_version();
  slot.seen_values = by_value && !has_one_of_its_own ? gradient.clone() : at::Tensor();
}

bool is_seen(const GradientSlot& slot) {
  const at::Tensor& gradient = slot.parameter.grad();
  return gradient.defined() && slot.seen.lock().get() == gradient.unsafeGetTensorImpl();
}

bool is_untouched(const GradientSlot& slot) {
  if (!is_seen(slot)) {
    return false;
  }
  const at::Tensor& gradient = slot.parameter.grad();
  if (gradient._version() == slot.seen_version) {
    return true;
  }
  return slot.seen_values.defined() &&
         at::isclose(gradient, slot.seen_values, /*rtol=*/0, /*atol=*/0, /*equal_nan=*/true)
             .all()
             .item<bool>();
}

bool is_zero(const GradientSlot& slot) {
  const at::Tensor& gradient = slot.parameter.grad();
  return gradient.defined() &&
         (gradient.is_sparse() ? gradient._nnz() == 0
                               : gradient.count_nonzero().item<std::int64_t>() == 0);
}

bool holds_pending(const GradientSlot& slot) {
  return slot.is_pending && slot.parameter.grad().defined() && !shows_shard(slot);
}

bool is_still_pending(const GradientSlot& slot) {
  return holds_pending(slot) && (is_untouched(slot) || !is_zero(slot));
}

void check_aside(GradientSlot& slot) {
  if (!slot.aside.defined()) {
    return;
  }
  if (!is_still_pending(slot)) {
    slot.aside.reset();
  } else if (!is_untouched(slot)) {
    throw InvalidUsage(
        join("the gradient of parameter ", slot.name,
             " was changed between backward passes that accumulate on top of an averaged "
             "gradient: call zero_grad() before accumulating, or change it after averaging; to put "
             "another in its place, call sync_gradients() after zero_grad() first"));
  }
}

void require_unchanged(const GradientSlot& slot) {
  if (!has_place(slot)) {
    return;
  }
  if (slot.parameter.scalar_type() != slot.view.scalar_type() ||
      slot.parameter.sizes() != slot.view.sizes() ||
      slot.parameter.device() != slot.view.device()) {
    throw_changed(slot, slot.parameter);
  }
}

}  // namespace pydist
