#include "kernels/cuda/arguments.h"

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "base/error.h"

namespace pydist {
namespace {

constexpr std::uint64_t kMostElementsOfALaunch = std::uint64_t{1} << 40;
// Launch geometry counts segments in 32 bits.
constexpr std::uint64_t kMostSegments = std::uint64_t{1} << 31;

bool is_float32_or_16_bit(DType dtype) {
  return dtype == DType::kFloat32 || is_16_bit_float(dtype);
}

bool is_known(DType dtype) { return static_cast<int>(dtype) < kDTypeCount; }

// Complex elements need the alignment of their parts alone.
std::size_t alignment(DType dtype) {
  return is_complex(dtype) ? element_size(dtype) / 2 : element_size(dtype);
}

std::string fault_in_buffer(std::string_view what, const void* buffer, std::uint64_t count,
                            std::size_t aligned_to) {
  if (count == 0) {
    return {};
  }
  if (buffer == nullptr) {
    return join(what, " is null, and there are ", count, " elements");
  }
  if (reinterpret_cast<std::uintptr_t>(buffer) % aligned_to != 0) {
    return join(what, " at ", buffer, " is not aligned to its elements, which need ", aligned_to,
                " bytes");
  }
  return {};
}

std::string fault_in_count(std::uint64_t count) {
  return count <= kMostElementsOfALaunch
             ? ""
             : join(count, " elements are too many for one buffer; at most ",
                    kMostElementsOfALaunch);
}

std::string fault_in_segments(const void* segments, std::uint64_t count) {
  if (segments == nullptr && count > 0) {
    return join("the table of ", count, " segments is null");
  }
  return count < kMostSegments ? "" : join(count, " segments are too many");
}

std::string fault_in_number(std::string_view what, double value, double least) {
  return value >= least && std::isfinite(value)
             ? ""
             : join(what, " must be a finite number of at least ", least, ", got ", value);
}

// The first fault; the rest is not looked at.
template <typename... Checks>
std::string first_of(Checks&&... checks) {
  std::string fault;
  static_cast<void>(((fault = checks(), !fault.empty()) || ...));
  return fault;
}

template <typename Segment, typename Check>
std::string fault_in_each(const Segment* segments, std::uint64_t count, Check&& check) {
  for (std::uint64_t i = 0; i < count; ++i) {
    std::string fault = fault_in_count(segments[i].count);
    if (fault.empty()) {
      fault = check(segments[i]);
    }
    if (!fault.empty()) {
      return join("segment ", i, " of ", count, ": ", fault);
    }
  }
  return {};
}

// ---- reduce -------------------------------------------------------------------------------

std::string fault_in_dtypes(const PydistCudaReduce& reduce) {
  bool alike = true;
  bool mixable = is_float32_or_16_bit(reduce.output_dtype);
  if (!is_known(reduce.output_dtype)) {
    return join("the output's dtype ", static_cast<int>(reduce.output_dtype), " is not known");
  }
  for (std::uint32_t i = 0; i < reduce.input_count; ++i) {
    const DType dtype = reduce.input_dtypes[i];
    if (!is_known(dtype)) {
      return join("the dtype ", static_cast<int>(dtype), " of input ", i, " is not known");
    }
    alike = alike && dtype == reduce.output_dtype;
    mixable = mixable && is_float32_or_16_bit(dtype);
    if (!alike && !mixable) {
      return join("input ", i, " is ", to_string(dtype), " and the output ",
                  to_string(reduce.output_dtype),
                  ": only float32, float16 and bfloat16 can be mixed");
    }
  }
  if (!is_supported(reduce.op, reduce.output_dtype)) {
    return join(to_string(reduce.op), " is not defined for ", to_string(reduce.output_dtype),
                " elements");
  }
  if (reduce.wire_dtype != DType::kFloat32) {
    if (!is_16_bit_float(reduce.wire_dtype)) {
      return join("the wire type must be float16, bfloat16 or, for none, float32, got ",
                  to_string(reduce.wire_dtype));
    }
    if (!mixable) {
      return join("a wire type is for float32, float16 and bfloat16 alone, not for ",
                  to_string(reduce.output_dtype));
    }
  }
  return {};
}

std::string fault_in_buffers(const PydistCudaReduce& reduce) {
  for (std::uint32_t i = 0; i < reduce.input_count; ++i) {
    std::string fault = fault_in_buffer(join("input ", i), reduce.inputs[i], reduce.count,
                                        alignment(reduce.input_dtypes[i]));
    if (!fault.empty()) {
      return fault;
    }
    if (reduce.inputs[i] == reduce.output && reduce.count > 0 &&
        element_size(reduce.input_dtypes[i]) != element_size(reduce.output_dtype)) {
      return join("input ", i, ", ", to_string(reduce.input_dtypes[i]),
                  ", is also the output, but ", to_string(reduce.output_dtype),
                  " elements lie elsewhere: give another output");
    }
  }
  return fault_in_buffer("the output", reduce.output, reduce.count, alignment(reduce.output_dtype));
}

// ---- convert ------------------------------------------------------------------------------

bool is_convertible(DType dtype) { return dtype <= DType::kBFloat16; }

std::string fault_in_segment(const PydistCudaSegment& segment, bool scales) {
  if (!is_known(segment.from_dtype) || !is_known(segment.to_dtype)) {
    return join("the dtypes ", static_cast<int>(segment.from_dtype), " and ",
                static_cast<int>(segment.to_dtype), " are not both known");
  }
  if (!is_convertible(segment.from_dtype) || !is_convertible(segment.to_dtype)) {
    if (segment.from_dtype != segment.to_dtype) {
      return join("no conversion from ", to_string(segment.from_dtype), " to ",
                  to_string(segment.to_dtype),
                  "; there is one between float64, float32, float16 and bfloat16");
    }
    if (scales) {
      return join(to_string(segment.from_dtype),
                  " elements can be copied but not scaled; float64, float32, float16 and bfloat16 "
                  "can");
    }
  }
  if (segment.from == segment.to && segment.count > 0 &&
      element_size(segment.from_dtype) != element_size(segment.to_dtype)) {
    return join("source and target are the same buffer, but ", to_string(segment.from_dtype),
                " and ", to_string(segment.to_dtype), " differ in size");
  }
  return first_of(
      [&] {
        return fault_in_buffer("the source", segment.from, segment.count,
                               alignment(segment.from_dtype));
      },
      [&] {
        return fault_in_buffer("the target", segment.to, segment.count,
                               alignment(segment.to_dtype));
      });
}

// ---- optimizer steps ----------------------------------------------------------------------

std::string fault_in_common(const PydistCudaStep& common) {
  return first_of([&] { return fault_in_number("lr", common.lr, 0); },
                  [&] { return fault_in_number("weight_decay", common.weight_decay, 0); },
                  [&] {
                    return std::isfinite(common.gradient_scale)
                               ? ""
                               : join("gradient_scale must be finite, got ", common.gradient_scale);
                  },
                  [&] {
                    return common.found_inf == nullptr
                               ? std::string()
                               : fault_in_buffer("found_inf", common.found_inf, 1, sizeof(float));
                  });
}

std::string fault_in_beta(std::string_view what, double beta) {
  return beta >= 0 && beta < 1 ? "" : join(what, " must be in [0, 1), got ", beta);
}

template <typename Segment>
std::string fault_in_trained(const Segment& segment) {
  if (!is_float32_or_16_bit(segment.gradient_dtype)) {
    return join("gradients must be float32, float16 or bfloat16, not ",
                to_string(segment.gradient_dtype));
  }
  if (segment.parameter != nullptr && !is_float32_or_16_bit(segment.parameter_dtype)) {
    return join("parameters must be float32, float16 or bfloat16, not ",
                to_string(segment.parameter_dtype));
  }
  return first_of(
      [&] {
        return fault_in_buffer("the gradient", segment.gradient, segment.count,
                               alignment(segment.gradient_dtype));
      },
      [&] { return fault_in_buffer("the master", segment.master, segment.count, sizeof(float)); },
      [&] {
        return segment.parameter == nullptr
                   ? ""
                   : fault_in_buffer("the parameter", segment.parameter, segment.count,
                                     alignment(segment.parameter_dtype));
      });
}

}  // namespace

std::string fault_in(const PydistCudaReduce& reduce) {
  if (static_cast<int>(reduce.op) >= kReduceOpCount) {
    return join("the op ", static_cast<int>(reduce.op), " is not known");
  }
  static_assert(kPydistCudaMostInputs == 2);
  if (reduce.input_count == 0 || reduce.input_count > kPydistCudaMostInputs ||
      reduce.inputs == nullptr || reduce.input_dtypes == nullptr) {
    return join("takes one or two inputs, each with its dtype; got ", reduce.input_count,
                reduce.inputs == nullptr ? ", no table of inputs" : "",
                reduce.input_dtypes == nullptr ? ", no table of dtypes" : "");
  }
  if (reduce.op == ReduceOp::kPremulSum && reduce.factors == nullptr) {
    return join("premul_sum needs one factor for each of ", reduce.input_count,
                " inputs, and has none");
  }
  return first_of([&] { return fault_in_count(reduce.count); },
                  [&] { return fault_in_dtypes(reduce); },
                  [&] { return fault_in_buffers(reduce); });
}

std::string fault_in_device_scale(const PydistCudaConvert& convert) {
  if (convert.device_scale == nullptr) {
    return convert.device_divisor == nullptr ? ""
                                             : "a divisor on the device divides no scale there";
  }
  return first_of(
      [&] {
        return fault_in_buffer("the scale on the device", convert.device_scale, 1, sizeof(double));
      },
      [&] {
        return convert.device_divisor == nullptr
                   ? std::string()
                   : fault_in_buffer("the divisor on the device", convert.device_divisor, 1,
                                     sizeof(double));
      });
}

std::string fault_in(const PydistCudaConvert& convert) {
  const bool scales = convert.scale != 1.0 || convert.device_scale != nullptr;
  return first_of([&] { return fault_in_segments(convert.segments, convert.segment_count); },
                  [&] { return fault_in_device_scale(convert); },
                  [&] {
                    return fault_in_each(convert.segments, convert.segment_count,
                                         [&](const PydistCudaSegment& segment) {
                                           return fault_in_segment(segment, scales);
                                         });
                  });
}

std::string fault_in(const PydistCudaAdam& adam) {
  return first_of(
      [&] { return fault_in_segments(adam.segments, adam.segment_count); },
      [&] { return fault_in_common(adam.common); },
      [&] { return fault_in_beta("beta1", adam.beta1); },
      [&] { return fault_in_beta("beta2", adam.beta2); },
      [&] { return fault_in_number("eps", adam.eps, 0); },
      [&] { return adam.step > 0 ? "" : std::string("the first step is 1, got 0"); },
      [&] {
        return fault_in_each(
            adam.segments, adam.segment_count, [&](const PydistCudaAdamSegment& segment) {
              const auto state = [&](std::string_view what, const float* buffer) {
                return fault_in_buffer(what, buffer, segment.count, sizeof(float));
              };
              return first_of([&] { return fault_in_trained(segment); },
                              [&] { return state("exp_avg", segment.exp_avg); },
                              [&] { return state("exp_avg_sq", segment.exp_avg_sq); },
                              [&] {
                                return adam.amsgrad == 0
                                           ? std::string()
                                           : state("max_exp_avg_sq", segment.max_exp_avg_sq);
                              });
            });
      });
}

std::string fault_in(const PydistCudaSgd& sgd) {
  return first_of([&] { return fault_in_segments(sgd.segments, sgd.segment_count); },
                  [&] { return fault_in_common(sgd.common); },
                  [&] { return fault_in_number("momentum", sgd.momentum, 0); },
                  [&] {
                    return sgd.nesterov != 0 && (sgd.momentum == 0 || sgd.dampening != 0)
                               ? join("Nesterov momentum needs a momentum and no dampening, got ",
                                      sgd.momentum, " and ", sgd.dampening)
                               : "";
                  },
                  [&] {
                    return fault_in_each(
                        sgd.segments, sgd.segment_count, [&](const PydistCudaSgdSegment& segment) {
                          return first_of([&] { return fault_in_trained(segment); },
                                          [&] {
                                            return sgd.momentum == 0
                                                       ? std::string()
                                                       : fault_in_buffer("the momentum buffer",
                                                                         segment.momentum,
                                                                         segment.count,
                                                                         sizeof(float));
                                          });
                        });
                  });
}

}  // namespace pydist
