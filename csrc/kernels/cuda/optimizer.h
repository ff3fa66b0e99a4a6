// One element of an optimizer step, to the bits of the CPU's kernels: see Note [Torch's rounding]
// in kernels/cpu/optimizer_step_kernels.inc.h.

#pragma once

#include "kernels/cuda/elements.h"

namespace pydist::cuda {

PYDIST_DEVICE float square_root(float value) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(value);
#else
  return __builtin_sqrtf(value);
#endif
}

// a * b + c with one rounding.
PYDIST_DEVICE float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

struct AdamRule {
  float keep;          // AdamW: 1 - lr * weight_decay; Adam: unused
  float weight_decay;  // Adam; AdamW: unused
  float new_in_avg;    // 1 - beta1
  float beta2;
  float new_in_avg_sq;          // 1 - beta2
  float bias_correction2_sqrt;  // sqrt(1 - beta2 ** step)
  float eps;
  float negative_step_size;  // -lr / (1 - beta1 ** step)
  bool decoupled;
  bool decays;
  bool amsgrad;
  bool maximize;

  PYDIST_DEVICE void update(float gradient, float& master, float& exp_avg, float& exp_avg_sq,
                            float& max_exp_avg_sq) const {
    gradient = maximize ? -gradient : gradient;
    if (decays && decoupled) {
      master = master * keep;
    } else if (decays) {
      gradient = fused(master, weight_decay, gradient);
    }
    const float difference = gradient - exp_avg;
    exp_avg = canonical(new_in_avg < 0.5f ? fused(difference, new_in_avg, exp_avg)
                                          : fused(difference, new_in_avg - 1.0f, gradient));
    exp_avg_sq = canonical(fused(gradient * new_in_avg_sq, gradient, exp_avg_sq * beta2));
    float second = exp_avg_sq;
    if (amsgrad) {
      max_exp_avg_sq = Maximum<float>::combine(max_exp_avg_sq, exp_avg_sq);
      second = max_exp_avg_sq;
    }
    const float denominator = square_root(second) / bias_correction2_sqrt + eps;
    master = canonical(master + exp_avg * negative_step_size / denominator);
  }
};

struct SgdRule {
  float negative_lr;
  float weight_decay;
  float momentum;
  float new_in_momentum;  // 1 - dampening
  bool decays;
  bool has_momentum;
  bool nesterov;
  bool first_step;
  bool maximize;

  PYDIST_DEVICE void update(float gradient, float& master, float& buffer) const {
    gradient = maximize ? -gradient : gradient;
    if (decays) {
      gradient = fused(master, weight_decay, gradient);
    }
    if (has_momentum) {
      const float next =
          first_step ? gradient : fused(gradient, new_in_momentum, buffer * momentum);
      buffer = canonical(next);
      gradient = nesterov ? fused(next, momentum, gradient) : next;
    }
    master = canonical(fused(gradient, negative_lr, master));
  }
};

}  // namespace pydist::cuda
