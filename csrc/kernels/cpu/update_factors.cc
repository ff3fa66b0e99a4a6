#include "kernels/cpu/update_factors.h"

#include <cmath>

#include "base/error.h"

namespace pydist {
namespace {

void require_beta(const char* name, double beta) {
  if (!(beta >= 0 && beta < 1)) {
    throw InvalidUsage(join("adam_step: ", name, " must be from 0 to less than 1, got ", beta));
  }
}

}  // namespace

AdamFactors factors_of(const AdamRule& rule, double step, double gradient_scale) {
  require_beta("beta1", rule.beta1);
  require_beta("beta2", rule.beta2);
  if (!(step >= 1)) {
    throw InvalidUsage(join("adam_step: steps count from 1, this one included; got ", step));
  }
  const double first_correction = 1 - std::pow(rule.beta1, step);
  const double second_correction = 1 - std::pow(rule.beta2, step);
  const double step_size = rule.lr / first_correction;
  return {
      .gradient_scale = rule.maximize ? -gradient_scale : gradient_scale,
      .parameter_decay = rule.decoupled ? 1 - rule.lr * rule.weight_decay : 1.0,
      .gradient_decay = rule.decoupled ? 0.0 : rule.weight_decay,
      .first_weight = 1 - rule.beta1,
      .beta2 = rule.beta2,
      .second_weight = 1 - rule.beta2,
      .correction_root = std::pow(second_correction, 0.5),
      .epsilon = rule.epsilon,
      .negative_step_size = -step_size,
      .amsgrad = rule.amsgrad,
  };
}

SgdFactors factors_of(const SgdRule& rule, bool begins, double gradient_scale) {
  return {
      .gradient_scale = rule.maximize ? -gradient_scale : gradient_scale,
      .gradient_decay = rule.weight_decay,
      .momentum = rule.momentum,
      .gradient_weight = 1 - rule.dampening,
      .negative_lr = -rule.lr,
      .nesterov = rule.nesterov,
      .begins = begins,
  };
}

}  // namespace pydist
