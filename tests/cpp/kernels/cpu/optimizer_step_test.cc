// The fused steps against a scalar reference that rounds after each of torch's operators, bit for
// bit, on every instruction set.

#include "kernels/cpu/optimizer_step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "kernels/cpu/convert.h"
#include "kernels/optimizer_step_reference.h"

namespace pydist {
namespace {

using scalar::adam_reference;
using scalar::sgd_reference;

// ---- arrays -------------------------------------------------------------------------------

using Bytes = std::vector<unsigned char>;

constexpr unsigned char kUntouched = 0xa5;
// On both sides of an array, to see what is written beside it; not a multiple of any vector.
constexpr std::size_t kMargin = 136;

// `count` elements at an address that is aligned to one of them, and no more for an odd `skew`.
struct Array {
  DType dtype;
  std::size_t begin;
  Bytes bytes;

  Array(DType type, std::size_t count, std::size_t skew)
      : dtype(type),
        begin(kMargin + skew * element_size(type)),
        bytes(count * element_size(type) + begin + kMargin, kUntouched) {}

  [[nodiscard]] void* data() { return bytes.data() + begin; }

  template <typename T>
  [[nodiscard]] T* as() {
    return reinterpret_cast<T*>(bytes.data() + begin);
  }
};

// Values of every kind: zeros, subnormals, huge, infinite, NaN, and mostly ordinary ones.
template <typename T>
T any_value(std::mt19937_64& random) {
  using Limits = std::numeric_limits<T>;
  const T special[] = {T{0},
                       -T{0},
                       Limits::denorm_min(),
                       -Limits::min() / 3,
                       Limits::min(),
                       Limits::max(),
                       -Limits::max(),
                       Limits::infinity(),
                       T{1},
                       -Limits::infinity(),
                       Limits::quiet_NaN(),
                       T{-1}};
  switch (random() % 8) {
    case 0:
      return special[random() % std::size(special)];
    case 1:  // any exponent
      if constexpr (sizeof(T) == 4) {
        return std::bit_cast<T>(static_cast<std::uint32_t>(random()));
      } else {
        return std::bit_cast<T>(random());
      }
    default:
      return std::normal_distribution<T>(0, static_cast<T>(std::exp2(random() % 6)))(random);
  }
}

void fill(Array& array, std::size_t count, std::mt19937_64& random, bool is_square) {
  if (array.dtype == DType::kFloat64) {
    for (std::size_t i = 0; i < count; ++i) {
      const auto value = any_value<double>(random);
      array.as<double>()[i] = is_square ? std::fabs(value) : value;
    }
    return;
  }
  std::vector<float> values(count);
  for (float& value : values) {
    value = any_value<float>(random);
    value = is_square ? std::fabs(value) : value;
  }
  if (array.dtype == DType::kFloat32) {
    std::copy(values.begin(), values.end(), array.as<float>());
  } else {
    narrow_from_float32(array.dtype, values.data(), array.data(), count);
  }
}

// Of a type that widens exactly to T.
template <typename T>
std::vector<T> widened_array(Array& array, std::size_t count) {
  std::vector<T> wide(count);
  if constexpr (std::is_same_v<T, float>) {
    if (array.dtype != DType::kFloat32) {
      widen_to_float32(array.dtype, array.data(), wide.data(), count);
      return wide;
    }
  }
  std::copy_n(array.as<T>(), count, wide.begin());
  return wide;
}

template <typename T>
void put(Array& array, const std::vector<T>& values) {
  std::vector<T> stored = values;
  for (T& value : stored) {
    value = std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value;
  }
  std::copy(stored.begin(), stored.end(), array.as<T>());
}

struct Types {
  DType parameter;
  DType gradient;
};

std::vector<Types> all_types() {
  std::vector<Types> types = {{DType::kFloat64, DType::kFloat64}};
  for (const DType parameter : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const DType gradient : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      types.push_back({parameter, gradient});
    }
  }
  return types;
}

// All arrays of a segment, before a step.
struct Arrays {
  Types types;
  std::size_t count;
  Array parameter;
  Array gradient;
  Array master;  // empty where there is none
  std::vector<Array> states;

  Arrays(Types of, std::size_t elements, std::size_t skew, std::size_t state_count,
         std::mt19937_64& random)
      : types(of),
        count(elements),
        parameter(of.parameter, elements, skew),
        gradient(of.gradient, elements, skew + 1),
        master(DType::kFloat32, has_master() ? elements : 0, 2 * skew),
        states(state_count, Array(values_dtype(), elements, skew)) {
    fill(parameter, count, random, /*is_square=*/false);
    fill(gradient, count, random, /*is_square=*/false);
    if (has_master()) {
      fill(master, count, random, /*is_square=*/false);
      // Two of three parameters are their copy's, as after a step; the others were written since.
      const Bytes written = parameter.bytes;
      round_master();
      for (std::size_t i = 0; i < count; i += 3) {
        std::copy_n(written.begin() + parameter.begin + 2 * i, 2,
                    parameter.bytes.begin() + parameter.begin + 2 * i);
      }
    }
    for (std::size_t i = 0; i < state_count; ++i) {
      fill(states[i], count, random, /*is_square=*/i > 0);
    }
  }

  // The parameter, as a step leaves it.
  void round_master() {
    narrow_from_float32(types.parameter, master.as<float>(), parameter.data(), count);
  }

  [[nodiscard]] bool has_master() const { return element_size(types.parameter) == 2; }
  [[nodiscard]] DType values_dtype() const {
    return types.parameter == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  }

  [[nodiscard]] StepSegment segment() {
    StepSegment segment{.parameter_dtype = types.parameter,
                        .gradient_dtype = types.gradient,
                        .parameter = parameter.data(),
                        .gradient = gradient.data(),
                        .master = has_master() ? master.data() : nullptr,
                        .count = count};
    for (std::size_t i = 0; i < states.size(); ++i) {
      segment.states[i] = states[i].data();
    }
    return segment;
  }

  // Takes the step with `update(gradient, value, states)` for every element.
  template <typename T, typename Update>
  void take_reference_step(const Update& update) {
    Array& values = has_master() ? master : parameter;
    const std::vector<T> slopes = widened_array<T>(gradient, count);
    std::vector<T> next = widened_array<T>(values, count);
    if constexpr (std::is_same_v<T, float>) {
      if (has_master()) {
        const std::vector<float> given = widened_array<float>(parameter, count);
        round_master();
        const std::vector<float> kept = widened_array<float>(parameter, count);
        for (std::size_t i = 0; i < count; ++i) {
          next[i] = given[i] == kept[i] ? next[i] : given[i];
        }
      }
    }
    std::vector<std::vector<T>> next_states;
    for (Array& state : states) {
      next_states.push_back(widened_array<T>(state, count));
    }
    for (std::size_t i = 0; i < count; ++i) {
      T here[3] = {};
      for (std::size_t k = 0; k < states.size(); ++k) {
        here[k] = next_states[k][i];
      }
      update(slopes[i], next[i], here);
      for (std::size_t k = 0; k < states.size(); ++k) {
        next_states[k][i] = here[k];
      }
    }
    put(values, next);
    for (std::size_t k = 0; k < states.size(); ++k) {
      put(states[k], next_states[k]);
    }
    if (has_master()) {
      round_master();
    }
  }

  // Margins included.
  void expect_equal(Arrays& other, const std::string& where) {
    EXPECT_TRUE(parameter.bytes == other.parameter.bytes) << "parameter, " << where;
    EXPECT_TRUE(gradient.bytes == other.gradient.bytes) << "gradient, " << where;
    EXPECT_TRUE(master.bytes == other.master.bytes) << "master, " << where;
    for (std::size_t i = 0; i < states.size(); ++i) {
      EXPECT_TRUE(states[i].bytes == other.states[i].bytes) << "state " << i << ", " << where;
    }
  }
};

std::vector<AdamFactors> adam_cases() {
  std::vector<AdamFactors> cases;
  for (const bool decoupled : {false, true}) {
    for (const bool amsgrad : {false, true}) {
      for (const double weight_decay : {0.0, 0.1}) {
        cases.push_back(factors_of({.lr = 3e-3,
                                    .weight_decay = weight_decay,
                                    .decoupled = decoupled,
                                    .amsgrad = amsgrad,
                                    .maximize = decoupled != amsgrad},
                                   /*step=*/7, /*gradient_scale=*/amsgrad ? 0.37 : 1.0));
      }
    }
  }
  // Large steps, an average that forgets at once, no epsilon.
  cases.push_back(factors_of(
      {.lr = 40, .beta1 = 0.3, .beta2 = 0.5, .epsilon = 0, .weight_decay = 0.2}, 1, 1.0));
  cases.push_back(factors_of({.beta1 = 0.0, .beta2 = 0.0}, 1, 1.0));
  return cases;
}

std::vector<SgdFactors> sgd_cases() {
  // Nothing but zeros may change their sign.
  std::vector<SgdFactors> cases = {factors_of(SgdRule{.lr = 0}, /*begins=*/true, 1.0)};
  for (const double momentum : {0.0, 0.9}) {
    for (const double weight_decay : {0.0, 0.1}) {
      for (const bool nesterov : {false, true}) {
        for (const bool begins : {false, true}) {
          cases.push_back(factors_of({.lr = 0.3,
                                      .momentum = momentum,
                                      .dampening = nesterov ? 0.0 : 0.2,
                                      .weight_decay = weight_decay,
                                      .nesterov = nesterov,
                                      .maximize = begins},
                                     begins, /*gradient_scale=*/begins ? 1.0 : 1.0 / 1024));
        }
      }
    }
  }
  return cases;
}

class OptimizerStep : public ::testing::TestWithParam<InstructionSet> {
 protected:
  void expect_as_reference(const AdamFactors& factors, Arrays arrays, const std::string& where) {
    Arrays expected = arrays;
    adam_step(factors, arrays.segment(), GetParam());
    const auto update = [&](auto gradient, auto& value, auto* states) {
      adam_reference(factors, gradient, value, states);
    };
    step(expected, update);
    arrays.expect_equal(expected, where);
  }

  void expect_as_reference(const SgdFactors& factors, Arrays arrays, const std::string& where) {
    Arrays expected = arrays;
    sgd_step(factors, arrays.segment(), GetParam());
    const auto update = [&](auto gradient, auto& value, auto* states) {
      sgd_reference(factors, gradient, value, states);
    };
    step(expected, update);
    arrays.expect_equal(expected, where);
  }

  template <typename Update>
  static void step(Arrays& arrays, const Update& update) {
    if (arrays.values_dtype() == DType::kFloat64) {
      arrays.take_reference_step<double>(update);
    } else {
      arrays.take_reference_step<float>(update);
    }
  }
};

std::string named(const Types& types, std::size_t count, std::size_t rule) {
  return join(to_string(types.parameter), " of ", to_string(types.gradient), ", ", count,
              " elements, rule ", rule);
}

TEST_P(OptimizerStep, AdamRoundsAfterEachOperator) {
  std::mt19937_64 random(1);
  const std::vector<AdamFactors> cases = adam_cases();
  for (const Types& types : all_types()) {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      expect_as_reference(cases[i], {types, 3001, 0, cases[i].amsgrad ? 3u : 2u, random},
                          named(types, 3001, i));
    }
  }
}

TEST_P(OptimizerStep, SgdRoundsAfterEachOperator) {
  std::mt19937_64 random(2);
  const std::vector<SgdFactors> cases = sgd_cases();
  for (const Types& types : all_types()) {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      expect_as_reference(cases[i], {types, 3001, 0, cases[i].momentum != 0 ? 1u : 0u, random},
                          named(types, 3001, i));
    }
  }
}

TEST_P(OptimizerStep, EveryCountAtAnyAlignmentWritesThatMuch) {
  std::mt19937_64 random(3);
  const AdamFactors adam = adam_cases().back();
  const SgdFactors sgd = sgd_cases().back();
  for (const Types& types : all_types()) {
    for (std::size_t count = 0; count <= 70; ++count) {
      const std::size_t skew = count % 5;
      expect_as_reference(adam, {types, count, skew, 2, random}, named(types, count, 0));
      expect_as_reference(sgd, {types, count, skew, 1, random}, named(types, count, 1));
    }
  }
}

TEST_P(OptimizerStep, PiecesMakeTheWhole) {
  std::mt19937_64 random(4);
  const AdamFactors factors = adam_cases()[3];
  for (const Types& types : all_types()) {
    Arrays whole(types, 1000, 1, 3, random);
    Arrays pieces = whole;
    adam_step(factors, whole.segment(), GetParam());
    for (std::size_t begin = 0, length = 1; begin < 1000; begin += length, length += 7) {
      length = std::min(length, 1000 - begin);
      adam_step(factors, pieces.segment().part(begin, length), GetParam());
    }
    pieces.expect_equal(whole, named(types, 1000, 3));
  }
}

TEST_P(OptimizerStep, TrafficChangesNothing) {
  std::mt19937_64 random(5);
  for (const Types& types : all_types()) {
    for (const std::size_t state_count : {0, 1, 2, 3}) {
      Arrays arrays(types, 333, 1, state_count, random);
      if (arrays.has_master()) {
        // A NaN would be stored as another one.
        std::generate_n(arrays.master.as<float>(), 333, [&] { return 0.1F * random(); });
        arrays.round_master();
      }
      Arrays expected = arrays;
      step_traffic(state_count, arrays.segment(), GetParam());
      arrays.expect_equal(expected, named(types, 333, state_count));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sets, OptimizerStep, ::testing::ValuesIn(usable_instruction_sets()),
                         [](const auto& param) { return std::string(to_string(param.param)); });

// The multiplication and addition with one rounding: every kind of cancellation and overflow, by
// the one rule that is nothing else.
TEST_P(OptimizerStep, OneRoundingForProductAndSum) {
  std::mt19937_64 random(6);
  constexpr std::size_t kCount = 1 << 18;
  for (const double factor : {-1.0, 0x1.fffffep-1, 0x1.000002p0, 3e-39, -0x1.555556p-2, 1e30}) {
    const SgdFactors factors{.gradient_scale = 1,
                             .gradient_decay = 0,
                             .momentum = 0,
                             .gradient_weight = 1,
                             .negative_lr = factor,
                             .nesterov = false,
                             .begins = false};
    Arrays arrays({DType::kFloat32, DType::kFloat32}, kCount, 0, 0, random);
    auto* const values = arrays.parameter.as<float>();
    const auto* const gradients = arrays.gradient.as<float>();
    for (std::size_t i = 0; i < kCount / 2; ++i) {  // sums that nearly vanish
      values[i] = static_cast<float>(-factor * gradients[i]) *
                  (1.0f + 0x1p-23f * static_cast<float>(random() % 3));
    }
    Arrays expected = arrays;
    sgd_step(factors, arrays.segment(), GetParam());
    expected.take_reference_step<float>([&](float gradient, float& value, float*) {
      value = std::fma(gradient, static_cast<float>(factor), value);
    });
    arrays.expect_equal(expected, join("factor ", factor));
  }
}

TEST(OptimizerStepCpu, FactorsFollowPython) {
  // AdamW(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01) at its third step, by Python 3.11.
  const AdamFactors adam = factors_of(
      {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.01}, 3, 1.0);
  EXPECT_EQ(adam.parameter_decay, 1 - 1e-3 * 0.01);
  EXPECT_EQ(adam.gradient_decay, 0.0);
  EXPECT_EQ(adam.first_weight, 1 - 0.9);
  EXPECT_EQ(adam.second_weight, 1 - 0.999);
  EXPECT_EQ(adam.correction_root, 0.05474487190596028);
  EXPECT_EQ(adam.negative_step_size, -0.003690036900369005);
  const AdamFactors coupled =
      factors_of({.weight_decay = 0.01, .decoupled = false, .maximize = true}, 1, 0.25);
  EXPECT_EQ(coupled.parameter_decay, 1.0);
  EXPECT_EQ(coupled.gradient_decay, 0.01);
  EXPECT_EQ(coupled.gradient_scale, -0.25);
}

TEST(OptimizerStepCpu, StepsCountFromOneAndBetasAreBelowOne) {
  EXPECT_THROW((void)factors_of(AdamRule{}, 0, 1.0), InvalidUsage);
  EXPECT_THROW((void)factors_of(AdamRule{}, std::nan(""), 1.0), InvalidUsage);
  EXPECT_THROW((void)factors_of(AdamRule{.beta1 = 1.0}, 1, 1.0), InvalidUsage);
  EXPECT_THROW((void)factors_of(AdamRule{.beta2 = -0.1}, 1, 1.0), InvalidUsage);
}

TEST(OptimizerStepCpu, OtherTypesAreRefusedBeforeAnythingIsWritten) {
  EXPECT_THROW(require_step_types(DType::kInt32, DType::kFloat32, false), InvalidUsage);
  EXPECT_THROW(require_step_types(DType::kBFloat16, DType::kBFloat16, false), InvalidUsage);
  EXPECT_THROW(require_step_types(DType::kFloat32, DType::kFloat32, true), InvalidUsage);
  EXPECT_THROW(require_step_types(DType::kFloat32, DType::kFloat64, false), InvalidUsage);
  EXPECT_THROW(require_step_types(DType::kFloat64, DType::kFloat32, false), InvalidUsage);
  float value = 1;
  double gradient = 1;
  EXPECT_THROW(sgd_step(factors_of(SgdRule{}, true, 1.0), {.gradient_dtype = DType::kFloat64,
                                                           .parameter = &value,
                                                           .gradient = &gradient,
                                                           .count = 1}),
               InvalidUsage);
  EXPECT_EQ(value, 1);
}

TEST(OptimizerStepCpu, AMissingArrayIsAnError) {
  float value = 1;
  const float gradient = 1;
  EXPECT_THROW(adam_step(factors_of(AdamRule{}, 1, 1.0),
                         {.parameter = &value, .gradient = &gradient, .count = 1}),
               Error);
  EXPECT_EQ(value, 1);
}

TEST(OptimizerStepCpu, ZeroElementsNeedNoArrays) {
  adam_step(factors_of(AdamRule{}, 1, 1.0), {});
  sgd_step(factors_of(SgdRule{}, true, 1.0), {});
  step_traffic(2, {});
}

}  // namespace
}  // namespace pydist
