// One element of an optimizer step, as torch.optim's single-tensor implementations compute it, each
// operation rounded to float32.

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
    if (decays) {
      if (decoupled) {
        master = master * keep;
      } else {
        gradient = gradient + weight_decay * master;
      }
    }
    const float difference = gradient - exp_avg;
    // torch.lerp, which is exact at either end.
    exp_avg = new_in_avg < 0.5f ? exp_avg + new_in_avg * difference
                                : gradient - difference * (1.0f - new_in_avg);
    exp_avg_sq = exp_avg_sq * beta2 + new_in_avg_sq * gradient * gradient;
    float second = exp_avg_sq;
    if (amsgrad) {
      max_exp_avg_sq = Maximum<float>::combine(max_exp_avg_sq, exp_avg_sq);
      second = max_exp_avg_sq;
    }
    const float denominator = square_root(second) / bias_correction2_sqrt + eps;
    master = master + negative_step_size * exp_avg / denominator;
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
      gradient = gradient + weight_decay * master;
    }
    if (has_momentum) {
      buffer = first_step ? gradient : buffer * momentum + new_in_momentum * gradient;
      gradient = nesterov ? gradient + momentum * buffer : buffer;
    }
    master = master + negative_lr * gradient;
  }
};

}  // namespace pydist::cuda
