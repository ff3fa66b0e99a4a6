// pydist._native.adam_step, sgd_step: one fused optimizer step on segments of flat arrays, spread
// over torch's threads, or launched on the current stream of their CUDA device.

#include <c10/core/DeviceGuard.h>

#include <array>
#include <map>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/bindings.h"
#include "bindings/step_segments.h"
#include "c10d/device_streams.h"
#include "kernels/cpu/optimizer_step.h"
#include "kernels/cuda/library.h"

namespace pydist {
namespace {

void require_count(const char* function, const char* name, std::size_t values, std::size_t count) {
  if (values != count) {
    throw InvalidUsage(join(function, ": ", name, " holds ", values, " values for ", count,
                            " parameters; give one for each."));
  }
}

// The number of the step that is taken, counting from 1, of each segment. The tensors hold the
// number of those that were taken before, as torch's optimizers keep it.
class StepCounts {
 public:
  // Throws InvalidUsage where there is not one for each of `count` segments.
  StepCounts(const std::vector<at::Tensor>& steps, std::size_t count) : tensors_(steps) {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      require_count_tensor(tensors_[i], i);
      values_.push_back(next(tensors_[i]));
    }
    require_count("adam_step", "step", values_.size(), count);
  }

  double operator[](std::size_t segment) const { return values_[segment]; }

  // Leaves the new numbers in the tensors.
  void keep() const {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const at::Tensor& tensor = tensors_[i];
      if (tensor.scalar_type() == at::kFloat) {
        *static_cast<float*>(tensor.mutable_data_ptr()) = static_cast<float>(values_[i]);
      } else {
        *static_cast<double*>(tensor.mutable_data_ptr()) = values_[i];
      }
    }
  }

 private:
  static void require_count_tensor(const at::Tensor& tensor, std::size_t segment) {
    const bool is_number =
        tensor.defined() && tensor.is_cpu() && tensor.numel() == 1 &&
        tensor.layout() == at::kStrided &&
        (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble);
    if (!is_number) {
      throw InvalidUsage(join("adam_step: step[", segment,
                              "] must be a CPU tensor of one float32 or float64 element."));
    }
  }

  // In the tensor's own precision, as torch counts.
  static double next(const at::Tensor& tensor) {
    return tensor.scalar_type() == at::kFloat
               ? *static_cast<const float*>(tensor.const_data_ptr()) + 1.0F
               : *static_cast<const double*>(tensor.const_data_ptr()) + 1.0;
  }

  std::vector<double> values_;
  const std::vector<at::Tensor>& tensors_;
};

// ---- on CUDA devices ----------------------------------------------------------------------

// What segments have in common for the kernels, whatever the rule.
template <typename CudaSegment>
CudaSegment cuda_segment(const StepSegment& segment) {
  const bool has_master = segment.master != nullptr;
  CudaSegment result = {};
  result.gradient = segment.gradient;
  result.master = static_cast<float*>(has_master ? segment.master : segment.parameter);
  result.parameter = has_master ? segment.parameter : nullptr;
  result.count = segment.count;
  result.gradient_dtype = segment.gradient_dtype;
  result.parameter_dtype = segment.parameter_dtype;
  return result;
}

// Calls launch(library, stream) for the stream that is current on the device, with the device
// current as well.
template <typename Launch>
void on_current_stream(Device device, const Launch& launch) {
  const c10::DeviceGuard guard(torch_device(device));
  launch(CudaLibrary::get(), current_stream(device).native_handle());
}

void launch_adam(const StepSegments& segments, const AdamRule& rule, const StepCounts& steps,
                 double gradient_scale, const float* found_inf) {
  // A launch is of one step; nearly always all segments are at the same.
  std::map<double, std::vector<PydistCudaAdamSegment>> by_step;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    auto segment = cuda_segment<PydistCudaAdamSegment>(segments[i]);
    segment.exp_avg = static_cast<float*>(segments[i].states[0]);
    segment.exp_avg_sq = static_cast<float*>(segments[i].states[1]);
    segment.max_exp_avg_sq = static_cast<float*>(segments[i].states[2]);
    by_step[steps[i]].push_back(segment);
  }
  on_current_stream(segments.device(), [&](const CudaLibrary& library, void* stream) {
    for (const auto& [step, together] : by_step) {
      PydistCudaAdam adam = {};
      adam.segments = together.data();
      adam.segment_count = together.size();
      adam.common.lr = rule.lr;
      adam.common.weight_decay = rule.weight_decay;
      adam.common.gradient_scale = gradient_scale;
      adam.common.maximize = rule.maximize ? 1 : 0;
      adam.common.found_inf = found_inf;
      adam.beta1 = rule.beta1;
      adam.beta2 = rule.beta2;
      adam.eps = rule.epsilon;
      adam.step = step >= 1 ? static_cast<std::uint64_t>(step) : 0;
      adam.decoupled_weight_decay = rule.decoupled ? 1 : 0;
      adam.amsgrad = rule.amsgrad ? 1 : 0;
      library.adam(adam, stream);
    }
  });
}

void launch_sgd(const StepSegments& segments, const SgdRule& rule, const std::vector<bool>& begins,
                double gradient_scale, const float* found_inf) {
  std::array<std::vector<PydistCudaSgdSegment>, 2> by_begins;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    auto segment = cuda_segment<PydistCudaSgdSegment>(segments[i]);
    segment.momentum = static_cast<float*>(segments[i].states[0]);
    by_begins[begins[i] ? 1 : 0].push_back(segment);
  }
  on_current_stream(segments.device(), [&](const CudaLibrary& library, void* stream) {
    for (std::size_t first = 0; first < by_begins.size(); ++first) {
      if (by_begins[first].empty()) {
        continue;
      }
      PydistCudaSgd sgd = {};
      sgd.segments = by_begins[first].data();
      sgd.segment_count = by_begins[first].size();
      sgd.common.lr = rule.lr;
      sgd.common.weight_decay = rule.weight_decay;
      sgd.common.gradient_scale = gradient_scale;
      sgd.common.maximize = rule.maximize ? 1 : 0;
      sgd.common.found_inf = found_inf;
      sgd.momentum = rule.momentum;
      sgd.dampening = rule.dampening;
      sgd.nesterov = rule.nesterov ? 1 : 0;
      sgd.first_step = first == 1 ? 1 : 0;
      library.sgd(sgd, stream);
    }
  });
}

// The number that `found_inf` holds on the device of the segments; null without one.
const float* flag_of(const StepSegments& segments, const std::optional<TensorArgument>& found_inf) {
  if (!found_inf) {
    return nullptr;
  }
  const at::Tensor& tensor = *found_inf->tensor;
  const bool is_flag = tensor.is_cuda() && tensor.device() == torch_device(segments.device()) &&
                       tensor.layout() == at::kStrided && tensor.scalar_type() == at::kFloat &&
                       tensor.numel() == 1;
  if (!is_flag) {
    throw InvalidUsage(join(segments.function(),
                            ": found_inf must be one float32 element on the CUDA device of the "
                            "parameters, not ",
                            tensor.numel(), " of ", c10::toString(tensor.scalar_type()), " on ",
                            tensor.device().str(), "."));
  }
  return static_cast<const float*>(tensor.const_data_ptr());
}

// ---- on either ----------------------------------------------------------------------------

void run_adam(const StepSegments& segments, const AdamRule& rule, const StepCounts& steps,
              double gradient_scale, StepThreads* threads) {
  std::vector<AdamFactors> factors;
  factors.reserve(segments.size());
  for (std::size_t i = 0; i < segments.size(); ++i) {
    // Nearly always all segments are at the same step.
    const bool is_as_before = i > 0 && steps[i] == steps[i - 1];
    factors.push_back(is_as_before ? factors.back() : factors_of(rule, steps[i], gradient_scale));
  }
  segments.for_each_part(
      [&](std::size_t index, const StepSegment& part) { adam_step(factors[index], part); },
      threads);
}

void run_sgd(const StepSegments& segments, const SgdRule& rule, const std::vector<bool>& begins,
             double gradient_scale, StepThreads* threads) {
  const std::array<SgdFactors, 2> factors = {factors_of(rule, /*begins=*/false, gradient_scale),
                                             factors_of(rule, /*begins=*/true, gradient_scale)};
  segments.for_each_part(
      [&](std::size_t index, const StepSegment& part) {
        sgd_step(factors[begins[index] ? 1 : 0], part);
      },
      threads);
}

// Runs step() without the GIL, on memory that lies apart.
template <typename Step>
void run(const StepSegments& segments, const Step& step) {
  const ReleasedGil released;
  segments.require_apart();
  step();
  segments.bump_versions();
}

void adam_step_on_tensors(const TensorsArgument& parameters, const TensorsArgument& gradients,
                          const OptionalTensors& masters, const TensorsArgument& exp_avgs,
                          const TensorsArgument& exp_avg_sqs,
                          const OptionalTensors& max_exp_avg_sqs, const TensorsArgument& step,
                          double lr, double beta1, double beta2, double eps, double weight_decay,
                          bool decoupled, bool maximize, double gradient_scale,
                          const std::optional<TensorArgument>& found_inf,
                          std::optional<StepThreads*> threads) {
  StepSegments segments("adam_step", parameters, gradients, masters);
  segments.add_states("exp_avgs", exp_avgs.tensors);
  segments.add_states("exp_avg_sqs", exp_avg_sqs.tensors);
  if (max_exp_avg_sqs) {
    segments.add_states("max_exp_avg_sqs", max_exp_avg_sqs->tensors);
  }
  const StepCounts counts(step.tensors, segments.size());
  const float* const left_out = flag_of(segments, found_inf);
  const AdamRule rule{.lr = lr,
                      .beta1 = beta1,
                      .beta2 = beta2,
                      .epsilon = eps,
                      .weight_decay = weight_decay,
                      .decoupled = decoupled,
                      .amsgrad = max_exp_avg_sqs.has_value(),
                      .maximize = maximize};
  const bool is_on_device = segments.device().type == DeviceType::kCuda;
  run(segments, [&] {
    if (is_on_device) {
      launch_adam(segments, rule, counts, gradient_scale, left_out);
    } else {
      run_adam(segments, rule, counts, gradient_scale, threads.value_or(nullptr));
    }
  });
  counts.keep();
}

void sgd_step_on_tensors(const TensorsArgument& parameters, const TensorsArgument& gradients,
                         const OptionalTensors& masters, const OptionalTensors& momentum_buffers,
                         const std::vector<bool>& begins, double lr, double momentum,
                         double dampening, double weight_decay, bool nesterov, bool maximize,
                         double gradient_scale, const std::optional<TensorArgument>& found_inf,
                         std::optional<StepThreads*> threads) {
  StepSegments segments("sgd_step", parameters, gradients, masters);
  if ((momentum != 0) != momentum_buffers.has_value()) {
    throw InvalidUsage(join("sgd_step: momentum is ", momentum, ", so momentum_buffers must ",
                            momentum != 0 ? "be given." : "be None."));
  }
  if (momentum_buffers) {
    segments.add_states("momentum_buffers", momentum_buffers->tensors);
  }
  require_count("sgd_step", "begins", begins.size(), segments.size());
  const float* const left_out = flag_of(segments, found_inf);
  const SgdRule rule{.lr = lr,
                     .momentum = momentum,
                     .dampening = dampening,
                     .weight_decay = weight_decay,
                     .nesterov = nesterov,
                     .maximize = maximize};
  const bool is_on_device = segments.device().type == DeviceType::kCuda;
  run(segments, [&] {
    if (is_on_device) {
      launch_sgd(segments, rule, begins, gradient_scale, left_out);
    } else {
      run_sgd(segments, rule, begins, gradient_scale, threads.value_or(nullptr));
    }
  });
}

void step_traffic_on_tensors(const TensorsArgument& parameters, const TensorsArgument& gradients,
                             const OptionalTensors& masters,
                             const std::vector<TensorsArgument>& states) {
  if (states.size() > 3) {
    throw InvalidUsage(join("step_traffic: at most 3 states, got ", states.size(), "."));
  }
  StepSegments segments("step_traffic", parameters, gradients, masters);
  for (const TensorsArgument& state : states) {
    segments.add_states("states", state.tensors);
  }
  if (segments.device().type != DeviceType::kCpu) {
    throw InvalidUsage("step_traffic: the tensors must be on the CPU.");
  }
  run(segments, [&] {
    segments.for_each_part([count = segments.state_count()](std::size_t, const StepSegment& part) {
      step_traffic(count, part);
    });
  });
}

}  // namespace

void bind_optimizer_step(py::module_& module) {
  py::class_<StepThreads>(module, "StepThreads",
                          "Threads for adam_step and sgd_step on the CPU, beside torch's.")
      .def(py::init<int>(), py::arg("count"), "So many, the caller of a step included.")
      .def_property_readonly("count", &StepThreads::count, "The caller of a step included.");
  module.def("adam_step", &adam_step_on_tensors, py::arg("parameters"), py::arg("gradients"),
             py::arg("masters"), py::arg("exp_avgs"), py::arg("exp_avg_sqs"),
             py::arg("max_exp_avg_sqs") = py::none(), py::kw_only(), py::arg("step"), py::arg("lr"),
             py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
             py::arg("decoupled"), py::arg("maximize") = false, py::arg("gradient_scale") = 1.0,
             py::arg("found_inf") = py::none(), py::arg("threads") = py::none(),
             "One step of torch.optim.AdamW (decoupled) or Adam, in one pass over memory: on "
             "torch's threads, or on the current stream of the tensors' CUDA device. Contiguous "
             "tensors of one shape for each segment; masters only and always for 16-bit "
             "parameters, whose values count where they are not the master's, rounded; "
             "max_exp_avg_sqs means amsgrad; step is CPU tensors of one element each that count "
             "the steps before and are counted on; the gradients are multiplied by gradient_scale "
             "first. On a CUDA device, nothing but the counts changes where found_inf, a float32 "
             "number there, is not 0; on the CPU, threads take the place of torch's.");
  module.def(
      "sgd_step", &sgd_step_on_tensors, py::arg("parameters"), py::arg("gradients"),
      py::arg("masters"), py::arg("momentum_buffers"), py::kw_only(), py::arg("begins"),
      py::arg("lr"), py::arg("momentum"), py::arg("dampening"), py::arg("weight_decay"),
      py::arg("nesterov"), py::arg("maximize") = false, py::arg("gradient_scale") = 1.0,
      py::arg("found_inf") = py::none(), py::arg("threads") = py::none(),
      "One step of torch.optim.SGD, as adam_step. begins: of each, whether its momentum buffer "
      "holds nothing yet, and gets the gradient.");
  module.def("step_traffic", &step_traffic_on_tensors, py::arg("parameters"), py::arg("gradients"),
             py::arg("masters"), py::arg("states"),
             "Reads and writes what a step would, and changes nothing, unless a 16-bit parameter "
             "is not its master copy's: what a step takes at least.");
}

}  // namespace pydist
