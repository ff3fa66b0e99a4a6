// What a step of Adam and of SGD makes of one element, rounded after each of torch's operators: the
// reference for kernels.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/optimizer_step.h"
#include "kernels/one_rounding.h"

namespace pydist::scalar {

template <typename T>
void adam_reference(const AdamFactors& factors, T gradient, T& value, T* states) {
  const auto as = [](double factor) { return static_cast<T>(factor); };
  gradient = multiply(gradient, as(factors.gradient_scale));
  value = multiply(value, as(factors.parameter_decay));
  if (factors.gradient_decay != 0) {
    gradient = std::fma(value, as(factors.gradient_decay), gradient);
  }
  const T weight = as(factors.first_weight);
  const T difference = add(gradient, -states[0]);
  states[0] = weight < T{0.5} ? std::fma(difference, weight, states[0])
                              : std::fma(difference, add(weight, T{-1}), gradient);
  states[1] = std::fma(multiply(as(factors.second_weight), gradient), gradient,
                       multiply(states[1], as(factors.beta2)));
  T square = states[1];
  if (factors.amsgrad) {
    const bool is_nan = std::isnan(square) || std::isnan(states[2]);
    square = states[2] =
        is_nan ? std::numeric_limits<T>::quiet_NaN() : std::max(states[2], states[1]);
  }
  const T denominator =
      add(divide(std::sqrt(square), as(factors.correction_root)), as(factors.epsilon));
  value = add(value, divide(multiply(as(factors.negative_step_size), states[0]), denominator));
}

template <typename T>
void sgd_reference(const SgdFactors& factors, T gradient, T& value, T* states) {
  const auto as = [](double factor) { return static_cast<T>(factor); };
  gradient = multiply(gradient, as(factors.gradient_scale));
  if (factors.gradient_decay != 0) {
    gradient = std::fma(value, as(factors.gradient_decay), gradient);
  }
  if (factors.momentum != 0) {
    states[0] = factors.begins ? gradient
                               : std::fma(gradient, as(factors.gradient_weight),
                                          multiply(states[0], as(factors.momentum)));
    gradient = factors.nesterov ? std::fma(states[0], as(factors.momentum), gradient) : states[0];
  }
  value = std::fma(gradient, as(factors.negative_lr), value);
}

}  // namespace pydist::scalar
