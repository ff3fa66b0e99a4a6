// Adam, AdamW and SGD: one pass over gradient, master, state and parameter.

#include "kernels/cuda/optimizer.h"

#include <cmath>
#include <cstdint>

#include "base/dtype.h"
#include "kernels/cuda/arguments.h"
#include "kernels/cuda/module.h"
#include "kernels/cuda/segments.h"

namespace pydist::cuda {
namespace {

// `kStates` float32 buffers beside the master.
template <int kStates>
struct TrainedSegment {
  const void* gradient;
  void* parameter;
  float* master;
  float* states[kStates];
  std::uint64_t count;
  std::uint32_t first_tile;
  DType gradient_dtype;
  DType parameter_dtype;
};

// ---- rules on kWidth elements -------------------------------------------------------------

struct Adam {
  using Rule = AdamRule;
  static constexpr int kStates = 3;
  static PYDIST_DEVICE bool reads(const Rule& rule, int state) { return state < 2 || rule.amsgrad; }
  static PYDIST_DEVICE bool writes(const Rule& rule, int state) { return reads(rule, state); }
  static PYDIST_DEVICE void update(const Rule& rule, float gradient, float& master,
                                   float (&states)[kStates]) {
    rule.update(gradient, master, states[0], states[1], states[2]);
  }
};

struct Sgd {
  using Rule = SgdRule;
  static constexpr int kStates = 1;
  static PYDIST_DEVICE bool reads(const Rule& rule, int) {
    return rule.has_momentum && !rule.first_step;
  }
  static PYDIST_DEVICE bool writes(const Rule& rule, int) { return rule.has_momentum; }
  static PYDIST_DEVICE void update(const Rule& rule, float gradient, float& master,
                                   float (&states)[kStates]) {
    rule.update(gradient, master, states[0]);
  }
};

// ---- the kernel ---------------------------------------------------------------------------

template <typename Rule>
struct StepShared {
  Rule rule;
  float gradient_scale;
  const float* found_inf;
};

template <typename Optimizer>
struct Step {
  using Rule = typename Optimizer::Rule;
  using Segment = TrainedSegment<Optimizer::kStates>;
  using Params = SegmentTable<Segment, StepShared<Rule>>;
  static constexpr int kStates = Optimizer::kStates;

  static PYDIST_DEVICE void run(const Params& params, Place place) {
    const StepShared<Rule>& shared = params.shared;
    if (shared.found_inf != nullptr && *shared.found_inf != 0) {
      return;
    }
    const float gradient_scale = shared.gradient_scale;
    PYDIST_NO_UNROLL
    for (auto tile = static_cast<std::uint32_t>(place.block); tile < params.tiles;
         tile += static_cast<std::uint32_t>(place.blocks)) {
      const Segment& segment = params.segments[params.segment_of(tile)];
      const std::uint64_t first = std::uint64_t{tile - segment.first_tile} * kTileElements;
      const std::uint64_t left = segment.count - first;
      const unsigned count = left < kTileElements ? static_cast<unsigned>(left) : kTileElements;
      if (count == kTileElements && is_aligned(shared.rule, segment)) {
        PYDIST_NO_UNROLL
        for (unsigned k = 0; k < kTileGroups; ++k) {
          update<kGroup>(shared.rule, segment, first + (k * kBlockThreads + place.thread) * kGroup,
                         gradient_scale);
        }
      } else {
        PYDIST_NO_UNROLL
        for (unsigned element = place.thread; element < count; element += kBlockThreads) {
          update<1>(shared.rule, segment, first + element, gradient_scale);
        }
      }
    }
  }

 private:
  static PYDIST_DEVICE bool is_aligned(const Rule& rule, const Segment& segment) {
    bool aligned = is_group_aligned(segment.gradient, float_bytes(segment.gradient_dtype)) &&
                   is_group_aligned(segment.master, 4) &&
                   is_group_aligned(segment.parameter, float_bytes(segment.parameter_dtype));
    PYDIST_UNROLL
    for (int state = 0; state < kStates; ++state) {
      aligned = aligned &&
                (!Optimizer::writes(rule, state) || is_group_aligned(segment.states[state], 4));
    }
    return aligned;
  }

  // Values of the parameter that are not the master's, rounded.
  template <int kWidth>
  static PYDIST_DEVICE void take_what_was_written(DType dtype, const RawGroup& raw,
                                                  float (&master)[kWidth]) {
    float given[kWidth];
    widen_group<kWidth>(dtype, raw, given);
    PYDIST_UNROLL
    for (int v = 0; v < kWidth; ++v) {
      master[v] = given[v] == rounded_to(dtype, master[v]) ? master[v] : given[v];
    }
  }

  static PYDIST_DEVICE float rounded_to(DType dtype, float value) {
    return dtype == DType::kFloat16    ? widen_float16(narrow_float16(value))
           : dtype == DType::kBFloat16 ? widen_bfloat16(narrow_bfloat16(value))
                                       : value;
  }

  template <int kWidth>
  static PYDIST_DEVICE void update(const Rule& rule, const Segment& segment, std::uint64_t element,
                                   float gradient_scale) {
    // All loads before the first use.
    const RawGroup raw_gradient =
        load_group<kWidth>(segment.gradient, element, float_bytes(segment.gradient_dtype));
    const RawGroup raw_master = load_group<kWidth>(segment.master, element, 4);
    RawGroup raw_parameter = {};
    if (segment.parameter != nullptr) {
      raw_parameter =
          load_group<kWidth>(segment.parameter, element, float_bytes(segment.parameter_dtype));
    }
    RawGroup raw_states[kStates] = {};
    PYDIST_UNROLL
    for (int state = 0; state < kStates; ++state) {
      if (Optimizer::reads(rule, state)) {
        raw_states[state] = load_group<kWidth>(segment.states[state], element, 4);
      }
    }
    float gradient[kWidth];
    float master[kWidth];
    float states[kStates][kWidth];
    widen_group<kWidth>(segment.gradient_dtype, raw_gradient, gradient);
    widen_group<kWidth>(DType::kFloat32, raw_master, master);
    if (segment.parameter != nullptr) {
      take_what_was_written<kWidth>(segment.parameter_dtype, raw_parameter, master);
    }
    PYDIST_UNROLL
    for (int state = 0; state < kStates; ++state) {
      widen_group<kWidth>(DType::kFloat32, raw_states[state], states[state]);
    }
    PYDIST_UNROLL
    for (int v = 0; v < kWidth; ++v) {
      float of_element[kStates];
      PYDIST_UNROLL
      for (int state = 0; state < kStates; ++state) {
        of_element[state] = states[state][v];
      }
      Optimizer::update(rule, gradient[v] * gradient_scale, master[v], of_element);
      PYDIST_UNROLL
      for (int state = 0; state < kStates; ++state) {
        states[state][v] = of_element[state];
      }
    }
    store_group<kWidth>(segment.master, element, DType::kFloat32, master);
    PYDIST_UNROLL
    for (int state = 0; state < kStates; ++state) {
      if (Optimizer::writes(rule, state)) {
        store_group<kWidth>(segment.states[state], element, DType::kFloat32, states[state]);
      }
    }
    if (segment.parameter != nullptr) {
      store_group<kWidth>(segment.parameter, element, segment.parameter_dtype, master);
    }
  }
};

template <typename Rule>
StepShared<Rule> shared_of(const PydistCudaStep& common, const Rule& rule) {
  StepShared<Rule> shared = {};
  shared.rule = rule;
  shared.gradient_scale = static_cast<float>(common.gradient_scale);
  shared.found_inf = common.found_inf;
  return shared;
}

template <int kStates, typename Given>
TrainedSegment<kStates> enter_trained(const Given& given) {
  TrainedSegment<kStates> entry = {};
  entry.gradient = given.gradient;
  entry.parameter = given.parameter;
  entry.master = given.master;
  entry.count = given.count;
  entry.gradient_dtype = given.gradient_dtype;
  entry.parameter_dtype = given.parameter_dtype;
  return entry;
}

template <typename Optimizer, typename Descriptor, typename Enter>
int step(const Descriptor& descriptor, const typename Optimizer::Rule& rule, Enter enter,
         void* stream) {
  using Kernel = Step<Optimizer>;
  typename Kernel::Params table = {};
  table.shared = shared_of(descriptor.common, rule);
  return for_each_table(descriptor.segments, descriptor.segment_count, table, enter,
                        [&](const typename Kernel::Params& params) {
                          return launch<Kernel>(params, params.tiles, stream);
                        });
}

}  // namespace

int load_optimizer_kernels() {
  if (const int error = load_kernel<Step<Adam>>(); error != 0) {
    return error;
  }
  return load_kernel<Step<Sgd>>();
}

}  // namespace pydist::cuda

int pydist_cuda_adam(const PydistCudaAdam* adam, void* stream) {
  using namespace pydist;
  using namespace pydist::cuda;
  if (adam == nullptr || !fault_in(*adam).empty()) {
    return kInvalidValue;
  }
  const PydistCudaStep& common = adam->common;
  const auto step_number = static_cast<double>(adam->step);
  // In float64 up to here, as in Python.
  AdamRule rule = {};
  rule.keep = static_cast<float>(1.0 - common.lr * common.weight_decay);
  rule.weight_decay = static_cast<float>(common.weight_decay);
  rule.new_in_avg = static_cast<float>(1.0 - adam->beta1);
  rule.beta2 = static_cast<float>(adam->beta2);
  rule.new_in_avg_sq = static_cast<float>(1.0 - adam->beta2);
  rule.bias_correction2_sqrt =
      static_cast<float>(std::pow(1.0 - std::pow(adam->beta2, step_number), 0.5));
  rule.eps = static_cast<float>(adam->eps);
  rule.negative_step_size =
      static_cast<float>(-(common.lr / (1.0 - std::pow(adam->beta1, step_number))));
  rule.decoupled = adam->decoupled_weight_decay != 0;
  rule.decays = common.weight_decay != 0;
  rule.amsgrad = adam->amsgrad != 0;
  rule.maximize = common.maximize != 0;
  return step<Adam>(
      *adam, rule,
      [](const PydistCudaAdamSegment& given) {
        auto entry = enter_trained<Adam::kStates>(given);
        entry.states[0] = given.exp_avg;
        entry.states[1] = given.exp_avg_sq;
        entry.states[2] = given.max_exp_avg_sq;
        return entry;
      },
      stream);
}

int pydist_cuda_sgd(const PydistCudaSgd* sgd, void* stream) {
  using namespace pydist;
  using namespace pydist::cuda;
  if (sgd == nullptr || !fault_in(*sgd).empty()) {
    return kInvalidValue;
  }
  const PydistCudaStep& common = sgd->common;
  SgdRule rule = {};
  rule.negative_lr = static_cast<float>(-common.lr);
  rule.weight_decay = static_cast<float>(common.weight_decay);
  rule.momentum = static_cast<float>(sgd->momentum);
  rule.new_in_momentum = static_cast<float>(1.0 - sgd->dampening);
  rule.decays = common.weight_decay != 0;
  rule.has_momentum = sgd->momentum != 0;
  rule.nesterov = sgd->nesterov != 0;
  rule.first_step = sgd->first_step != 0;
  rule.maximize = common.maximize != 0;
  return step<Sgd>(
      *sgd, rule,
      [](const PydistCudaSgdSegment& given) {
        auto entry = enter_trained<Sgd::kStates>(given);
        entry.states[0] = given.momentum;
        return entry;
      },
      stream);
}
