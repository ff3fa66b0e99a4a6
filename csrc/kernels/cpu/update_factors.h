// The update rules of the fused optimizer step, and the numbers of them that are the same for every
// element.
//
// The factors are computed in float64, in the order in which Python computes them in
// torch.optim.Adam, AdamW and SGD, and with the same pow(); a kernel rounds them to the type that
// it computes in, as torch's operators round a Python number. Pure; thread safe.

#pragma once

namespace pydist {

// torch.optim.Adam, or AdamW where the weight decay is decoupled.
struct AdamRule {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0.0;
  // The parameter shrinks (AdamW), rather than the gradient grows (L2, Adam).
  bool decoupled = true;
  bool amsgrad = false;
  bool maximize = false;
};

struct SgdRule {
  double lr = 1e-3;
  double momentum = 0.0;
  double dampening = 0.0;
  double weight_decay = 0.0;
  bool nesterov = false;
  bool maximize = false;
};

struct AdamFactors {
  double gradient_scale;      // negative where the rule maximises
  double parameter_decay;     // the parameter is multiplied by it first; 1 changes nothing
  double gradient_decay;      // so much of the parameter is added to the gradient; 0: none
  double first_weight;        // 1 - beta1
  double beta2;               //
  double second_weight;       // 1 - beta2
  double correction_root;     // (1 - beta2^step)^0.5
  double epsilon;             //
  double negative_step_size;  // -lr / (1 - beta1^step)
  bool amsgrad;
};

struct SgdFactors {
  double gradient_scale;   // negative where the rule maximises
  double gradient_decay;   // so much of the parameter is added to the gradient; 0: none
  double momentum;         // 0: there is no buffer
  double gradient_weight;  // 1 - dampening
  double negative_lr;
  bool nesterov;
  bool begins;  // the buffer holds nothing yet: the gradient becomes its first value
};

// `step` counts from 1 and includes this one. The gradient is multiplied by `gradient_scale` first.
// Throws InvalidUsage where step < 1 or a beta lies outside of [0, 1).
[[nodiscard]] AdamFactors factors_of(const AdamRule& rule, double step, double gradient_scale);

[[nodiscard]] SgdFactors factors_of(const SgdRule& rule, bool begins, double gradient_scale);

}  // namespace pydist
