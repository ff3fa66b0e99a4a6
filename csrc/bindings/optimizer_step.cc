// pydist._native.adam_step, sgd_step: one fused optimizer step on segments of flat arrays, spread
// over torch's threads.

#include <algorithm>
#include <array>
#include <string>
#include <variant>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/bindings.h"
#include "bindings/torch_threads.h"
#include "c10d/tensors.h"
#include "kernels/optimizer_step_cpu.h"

namespace pydist {
namespace {

using Tensors = std::vector<at::Tensor>;
using OptionalTensors = std::optional<TensorsArgument>;

// One argument of a call: a tensor for each segment.
struct Role {
  const char* name;
  const Tensors* tensors;
  bool is_written;
};

struct MemoryRange {
  const std::byte* begin;
  const std::byte* end;
  const Role* role;
  std::size_t segment;
};

std::string label(const char* function, const Role& role, std::size_t segment) {
  return join(function, ": ", role.name, "[", segment, "]");
}

// A thread takes at least so many elements: fewer are done sooner than another thread has begun.
constexpr std::int64_t kElementsPerThread = 32 * 1024;
// What is cut over threads is whole blocks of elements.
constexpr std::int64_t kBlock = 1024;

class Segments {
 public:
  Segments(const char* function, const TensorsArgument& parameters,
           const TensorsArgument& gradients, const OptionalTensors& masters)
      : function_(function), parameters_(&parameters.tensors), has_masters_(masters.has_value()) {
    segments_.resize(parameters_->size());
    add({"parameters", parameters_, /*is_written=*/true});
    add({"gradients", &gradients.tensors, /*is_written=*/false});
    if (masters) {
      add({"masters", &masters->tensors, /*is_written=*/true});
    }
    for (std::size_t i = 0; i < segments_.size(); ++i) {
      StepSegment& segment = segments_[i];
      const at::Tensor& parameter = (*parameters_)[i];
      const at::Tensor& gradient = gradients.tensors[i];
      segment.parameter_dtype = supported(roles_[0], i);
      segment.gradient_dtype = supported(roles_[1], i);
      try {
        require_step_types(segment.parameter_dtype, segment.gradient_dtype, has_masters_);
      } catch (const InvalidUsage& error) {
        throw InvalidUsage(join(function_, ": parameters[", i, "]: ", error.what(), "."));
      }
      segment.count = static_cast<std::size_t>(parameter.numel());
      segment.parameter = parameter.mutable_data_ptr();
      segment.gradient = gradient.const_data_ptr();
      if (has_masters_) {
        require_type(roles_[2], i);
        segment.master = masters->tensors[i].mutable_data_ptr();
      }
    }
  }

  void add_states(const char* name, const Tensors& tensors) {
    add({name, &tensors, /*is_written=*/true});
    for (std::size_t i = 0; i < segments_.size(); ++i) {
      require_type(roles_.back(), i);
      segments_[i].states[state_count_] = tensors[i].mutable_data_ptr();
    }
    ++state_count_;
  }

  [[nodiscard]] std::size_t size() const { return segments_.size(); }
  [[nodiscard]] std::size_t state_count() const { return state_count_; }

  // Calls step(index, segment) for parts of segments that together are all of them, on torch's
  // threads. The GIL is not needed.
  template <typename Step>
  void run(const Step& step) {
    require_apart();
    std::vector<std::size_t> ends;
    ends.reserve(segments_.size());
    std::size_t total = 0;
    for (const StepSegment& segment : segments_) {
      ends.push_back(total += segment.count);
    }
    const auto blocks = (static_cast<std::int64_t>(total) + kBlock - 1) / kBlock;
    on_torch_threads(
        blocks, kElementsPerThread / kBlock, [&](std::int64_t first, std::int64_t last) {
          auto begin = static_cast<std::size_t>(first * kBlock);
          const std::size_t end = std::min(total, static_cast<std::size_t>(last * kBlock));
          auto index = static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), begin) -
                                                ends.begin());
          for (; begin < end; ++index) {
            const std::size_t start = ends[index] - segments_[index].count;
            const std::size_t stop = std::min(end, ends[index]);
            if (begin < stop) {
              step(index, segments_[index].part(begin - start, stop - begin));
              begin = stop;
            }
          }
        });
    // As torch's operators do in place, so that autograd notices.
    for (const Role& role : roles_) {
      if (role.is_written) {
        for (const at::Tensor& tensor : *role.tensors) {
          if (!tensor.is_inference()) {
            tensor.unsafeGetTensorImpl()->bump_version();
          }
        }
      }
    }
  }

 private:
  void add(const Role& role) {
    if (role.tensors->size() != segments_.size()) {
      throw InvalidUsage(join(function_, ": ", role.name, " holds ", role.tensors->size(),
                              " tensors, parameters ", segments_.size(),
                              "; every parameter needs one of each."));
    }
    for (std::size_t i = 0; i < segments_.size(); ++i) {
      const at::Tensor& tensor = (*role.tensors)[i];
      const at::Tensor& parameter = (*parameters_)[i];
      if (!tensor.defined() || tensor.device().type() != at::kCPU ||
          tensor.layout() != at::kStrided || !tensor.is_contiguous() || tensor.is_neg()) {
        throw InvalidUsage(join(label(function_, role, i), " must be a contiguous CPU tensor."));
      }
      if (tensor.sizes() != parameter.sizes()) {
        throw InvalidUsage(join(label(function_, role, i), " has shape ", tensor.sizes(),
                                ", its parameter ", parameter.sizes(), "."));
      }
    }
    roles_.push_back(role);
  }

  DType supported(const Role& role, std::size_t segment) const {
    const at::ScalarType type = (*role.tensors)[segment].scalar_type();
    const std::optional<DType> dtype = dtype_of(type);
    if (!dtype) {
      throw InvalidUsage(join(label(function_, role, segment), " is of type ", type,
                              "; an optimizer step takes floating-point types."));
    }
    return *dtype;
  }

  // Masters and states are of the type that the step is computed in.
  void require_type(const Role& role, std::size_t segment) const {
    const at::ScalarType expected =
        segments_[segment].parameter_dtype == DType::kFloat64 ? at::kDouble : at::kFloat;
    const at::ScalarType type = (*role.tensors)[segment].scalar_type();
    if (type != expected) {
      throw InvalidUsage(join(label(function_, role, segment), " is of type ", type, ", expected ",
                              expected, " for a parameter of type ",
                              (*parameters_)[segment].scalar_type(), "."));
    }
  }

  void require_apart() const {
    std::vector<MemoryRange> ranges;
    ranges.reserve(roles_.size() * segments_.size());
    for (const Role& role : roles_) {
      for (std::size_t i = 0; i < segments_.size(); ++i) {
        const at::Tensor& tensor = (*role.tensors)[i];
        if (tensor.numel() > 0) {
          const auto* const begin = static_cast<const std::byte*>(tensor.const_data_ptr());
          ranges.push_back({begin, begin + tensor.nbytes(), &role, i});
        }
      }
    }
    std::sort(ranges.begin(), ranges.end(), [](const MemoryRange& left, const MemoryRange& right) {
      return left.begin < right.begin;
    });
    for (std::size_t i = 1; i < ranges.size(); ++i) {
      const MemoryRange& before = ranges[i - 1];
      const MemoryRange& after = ranges[i];
      if (after.begin < before.end) {
        throw InvalidUsage(join(label(function_, *before.role, before.segment), " and ",
                                after.role->name, "[", after.segment,
                                "] share memory; all tensors of a step must lie apart."));
      }
    }
  }

  const char* function_;
  const Tensors* parameters_;
  bool has_masters_;
  std::vector<Role> roles_;
  std::vector<StepSegment> segments_;
  std::size_t state_count_ = 0;
};

// One for all segments, or one for each.
template <typename Value>
using OneOrEach = std::variant<Value, std::vector<Value>>;

template <typename Value>
Value value_of(const OneOrEach<Value>& values, std::size_t segment) {
  const auto* const each = std::get_if<std::vector<Value>>(&values);
  return each != nullptr ? (*each)[segment] : std::get<Value>(values);
}

template <typename Value>
void require_count(const char* function, const char* name, const OneOrEach<Value>& values,
                   std::size_t count) {
  const auto* const each = std::get_if<std::vector<Value>>(&values);
  if (each != nullptr && each->size() != count) {
    throw InvalidUsage(join(function, ": ", name, " holds ", each->size(), " values for ", count,
                            " parameters; give one for each, or a single one for all."));
  }
}

void adam_step_on_tensors(const TensorsArgument& parameters, const TensorsArgument& gradients,
                          const OptionalTensors& masters, const TensorsArgument& exp_avgs,
                          const TensorsArgument& exp_avg_sqs,
                          const OptionalTensors& max_exp_avg_sqs, const OneOrEach<double>& step,
                          double lr, double beta1, double beta2, double eps, double weight_decay,
                          bool decoupled, bool maximize, double gradient_scale) {
  Segments segments("adam_step", parameters, gradients, masters);
  segments.add_states("exp_avgs", exp_avgs.tensors);
  segments.add_states("exp_avg_sqs", exp_avg_sqs.tensors);
  if (max_exp_avg_sqs) {
    segments.add_states("max_exp_avg_sqs", max_exp_avg_sqs->tensors);
  }
  require_count("adam_step", "step", step, segments.size());
  const AdamRule rule{.lr = lr,
                      .beta1 = beta1,
                      .beta2 = beta2,
                      .epsilon = eps,
                      .weight_decay = weight_decay,
                      .decoupled = decoupled,
                      .amsgrad = max_exp_avg_sqs.has_value(),
                      .maximize = maximize};
  std::vector<AdamFactors> factors;
  factors.reserve(segments.size());
  for (std::size_t i = 0; i < segments.size(); ++i) {
    // Nearly always all segments are at the same step.
    const bool is_as_before = i > 0 && value_of(step, i) == value_of(step, i - 1);
    factors.push_back(is_as_before ? factors.back()
                                   : factors_of(rule, value_of(step, i), gradient_scale));
  }
  const ReleasedGil released;
  segments.run(
      [&](std::size_t index, const StepSegment& part) { adam_step(factors[index], part); });
}

void sgd_step_on_tensors(const TensorsArgument& parameters, const TensorsArgument& gradients,
                         const OptionalTensors& masters, const OptionalTensors& momentum_buffers,
                         const OneOrEach<bool>& begins, double lr, double momentum,
                         double dampening, double weight_decay, bool nesterov, bool maximize,
                         double gradient_scale) {
  Segments segments("sgd_step", parameters, gradients, masters);
  if ((momentum != 0) != momentum_buffers.has_value()) {
    throw InvalidUsage(join("sgd_step: momentum is ", momentum, ", so momentum_buffers must ",
                            momentum != 0 ? "be given." : "be None."));
  }
  if (momentum_buffers) {
    segments.add_states("momentum_buffers", momentum_buffers->tensors);
  }
  require_count("sgd_step", "begins", begins, segments.size());
  const SgdRule rule{.lr = lr,
                     .momentum = momentum,
                     .dampening = dampening,
                     .weight_decay = weight_decay,
                     .nesterov = nesterov,
                     .maximize = maximize};
  const std::array<SgdFactors, 2> factors = {factors_of(rule, /*begins=*/false, gradient_scale),
                                             factors_of(rule, /*begins=*/true, gradient_scale)};
  const ReleasedGil released;
  segments.run([&](std::size_t index, const StepSegment& part) {
    sgd_step(factors[value_of(begins, index) ? 1 : 0], part);
  });
}

void step_traffic_on_tensors(const TensorsArgument& parameters, const TensorsArgument& gradients,
                             const OptionalTensors& masters,
                             const std::vector<TensorsArgument>& states) {
  if (states.size() > 3) {
    throw InvalidUsage(join("step_traffic: at most 3 states, got ", states.size(), "."));
  }
  Segments segments("step_traffic", parameters, gradients, masters);
  for (const TensorsArgument& state : states) {
    segments.add_states("states", state.tensors);
  }
  const ReleasedGil released;
  segments.run([count = segments.state_count()](std::size_t, const StepSegment& part) {
    step_traffic(count, part);
  });
}

}  // namespace

void bind_optimizer_step(py::module_& module) {
  module.def("adam_step", &adam_step_on_tensors, py::arg("parameters"), py::arg("gradients"),
             py::arg("masters"), py::arg("exp_avgs"), py::arg("exp_avg_sqs"),
             py::arg("max_exp_avg_sqs") = py::none(), py::kw_only(), py::arg("step"), py::arg("lr"),
             py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
             py::arg("decoupled"), py::arg("maximize") = false, py::arg("gradient_scale") = 1.0,
             "One step of torch.optim.AdamW (decoupled) or Adam, in one pass over memory, on "
             "torch's threads. Contiguous CPU tensors of one shape for each segment; masters only "
             "and always for 16-bit parameters; max_exp_avg_sqs means amsgrad; step counts from 1, "
             "this one included; the gradients are multiplied by gradient_scale first.");
  module.def("sgd_step", &sgd_step_on_tensors, py::arg("parameters"), py::arg("gradients"),
             py::arg("masters"), py::arg("momentum_buffers"), py::kw_only(), py::arg("begins"),
             py::arg("lr"), py::arg("momentum"), py::arg("dampening"), py::arg("weight_decay"),
             py::arg("nesterov"), py::arg("maximize") = false, py::arg("gradient_scale") = 1.0,
             "One step of torch.optim.SGD, as adam_step. begins: the momentum buffers hold nothing "
             "yet, and get the gradients.");
  module.def("step_traffic", &step_traffic_on_tensors, py::arg("parameters"), py::arg("gradients"),
             py::arg("masters"), py::arg("states"),
             "Reads and writes what a step would, and changes nothing but 16-bit parameters: what "
             "a step takes at least.");
}

}  // namespace pydist
