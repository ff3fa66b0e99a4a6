// pydist's CUDA kernels without a GPU: what they would do, done by the CPU kernels on a stream of
// the fake CUDA driver.
//
// FAKE_CUDA_KERNELS=foreign   they were compiled for other GPUs

#include "kernels/cuda/kernels.h"

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "cuda_driver.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/optimizer_step.h"
#include "kernels/cpu/reduce.h"

namespace {

// Buffers without elements may be null.
void move_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes != 0) {
    std::memmove(to, from, bytes);
  }
}

using pydist::DType;

constexpr int kNoKernelImageForDevice = 209;  // cudaErrorNoKernelImageForDevice

void enqueue(void* stream, const std::function<void()>& job) { fake_driver_enqueue(stream, &job); }

bool is_16_bit(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

// `count` values as float32, rounded to `wire` on the way if that is a 16-bit type.
std::vector<float> widened(const void* values, DType dtype, std::size_t count, DType wire) {
  std::vector<float> wide(count);
  if (is_16_bit(dtype)) {
    pydist::widen_to_float32(dtype, values, wide.data(), count);
  } else {
    const auto* const from = static_cast<const float*>(values);
    wide.assign(from, from + count);
    if (is_16_bit(wire)) {
      std::vector<std::uint16_t> narrow(count);
      pydist::narrow_from_float32(wire, wide.data(), narrow.data(), count);
      pydist::widen_to_float32(wire, narrow.data(), wide.data(), count);
    }
  }
  return wide;
}

void store(const std::vector<float>& values, void* to, DType dtype, DType wire) {
  if (is_16_bit(dtype)) {
    pydist::narrow_from_float32(dtype, values.data(), to, values.size());
  } else {
    const std::vector<float> rounded = widened(values.data(), DType::kFloat32, values.size(), wire);
    std::copy(rounded.begin(), rounded.end(), static_cast<float*>(to));
  }
}

struct Reduce {
  std::vector<const void*> inputs;
  std::vector<DType> dtypes;
  std::vector<double> factors;
  PydistCudaReduce plain;

  void run() const {
    bool is_of_one_type = !is_16_bit(plain.wire_dtype);
    for (const DType dtype : dtypes) {
      is_of_one_type &= dtype == plain.output_dtype;
    }
    void* output = plain.output;
    if (is_of_one_type) {
      pydist::reduce({plain.output_dtype, plain.op, plain.divisor, factors}, inputs, {&output, 1},
                     plain.count);
      return;
    }
    std::vector<std::vector<float>> wide;
    std::vector<const void*> wide_inputs;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      wide.push_back(widened(inputs[i], dtypes[i], plain.count, plain.wire_dtype));
      wide_inputs.push_back(wide.back().data());
    }
    std::vector<float> total(plain.count);
    void* const total_data = total.data();
    pydist::reduce({DType::kFloat32, plain.op, plain.divisor, factors}, wide_inputs,
                   {&total_data, 1}, plain.count);
    store(total, plain.output, plain.output_dtype, plain.wire_dtype);
  }
};

template <typename T>
void scale_values(const void* from, void* to, std::size_t count, double scale) {
  for (std::size_t i = 0; i < count; ++i) {
    T value;
    move_bytes(&value, static_cast<const char*>(from) + i * sizeof(T), sizeof(T));
    value *= static_cast<T>(scale);
    move_bytes(static_cast<char*>(to) + i * sizeof(T), &value, sizeof(T));
  }
}

void run_segment(const PydistCudaSegment& segment, double scale) {
  if (segment.from_dtype == segment.to_dtype && scale == 1.0) {
    move_bytes(segment.to, segment.from, segment.count * element_size(segment.from_dtype));
  } else if (segment.from_dtype == DType::kFloat64) {
    scale_values<double>(segment.from, segment.to, segment.count, scale);
  } else {
    std::vector<float> wide =
        widened(segment.from, segment.from_dtype, segment.count, DType::kFloat32);
    if (scale != 1.0) {
      scale_values<float>(wide.data(), wide.data(), wide.size(), scale);
    }
    store(wide, segment.to, segment.to_dtype, DType::kFloat32);
  }
}

template <typename Segment>
pydist::StepSegment step_segment(const Segment& given) {
  const bool has_master = given.parameter != nullptr;
  return {.parameter_dtype = has_master ? given.parameter_dtype : DType::kFloat32,
          .gradient_dtype = given.gradient_dtype,
          .parameter = has_master ? given.parameter : given.master,
          .gradient = given.gradient,
          .master = has_master ? given.master : nullptr,
          .count = given.count};
}

}  // namespace

extern "C" {

int pydist_cuda_abi_version() { return PYDIST_CUDA_ABI_VERSION; }
const char* pydist_cuda_targets() { return "fake"; }
const char* pydist_cuda_error_text(int) { return "an error of the fake kernels"; }
int pydist_cuda_device_count(int* count) {
  *count = 8;
  return 0;
}
int pydist_cuda_load_kernels() {
  const char* const fault = std::getenv("FAKE_CUDA_KERNELS");
  return fault != nullptr && fault == std::string_view("foreign") ? kNoKernelImageForDevice : 0;
}

int pydist_cuda_reduce(const PydistCudaReduce* reduce, void* stream) {
  Reduce job{{}, {}, {}, *reduce};
  job.inputs.assign(reduce->inputs, reduce->inputs + reduce->input_count);
  job.dtypes.assign(reduce->input_dtypes, reduce->input_dtypes + reduce->input_count);
  if (reduce->factors != nullptr) {
    job.factors.assign(reduce->factors, reduce->factors + reduce->input_count);
  }
  enqueue(stream, [job] { job.run(); });
  return 0;
}

int pydist_cuda_convert(const PydistCudaConvert* convert, void* stream) {
  const std::vector<PydistCudaSegment> segments(convert->segments,
                                                convert->segments + convert->segment_count);
  enqueue(stream, [segments, scale = convert->scale, on_device = convert->device_scale,
                   divisor = convert->device_divisor] {
    const double divided_by = divisor == nullptr ? 1.0 : *divisor;
    const double given = on_device == nullptr ? 1.0
                         : divided_by == 0    ? 0.0
                                              : *on_device / divided_by;
    for (const PydistCudaSegment& segment : segments) {
      if (given == 0) {
        std::memset(segment.to, 0, segment.count * element_size(segment.to_dtype));
      } else {
        run_segment(segment, scale * given);
      }
    }
  });
  return 0;
}

int pydist_cuda_adam(const PydistCudaAdam* adam, void* stream) {
  const pydist::AdamFactors factors =
      pydist::factors_of({.lr = adam->common.lr,
                          .beta1 = adam->beta1,
                          .beta2 = adam->beta2,
                          .epsilon = adam->eps,
                          .weight_decay = adam->common.weight_decay,
                          .decoupled = adam->decoupled_weight_decay != 0,
                          .amsgrad = adam->amsgrad != 0,
                          .maximize = adam->common.maximize != 0},
                         static_cast<double>(adam->step), adam->common.gradient_scale);
  const std::vector<PydistCudaAdamSegment> segments(adam->segments,
                                                    adam->segments + adam->segment_count);
  enqueue(stream, [factors, segments, found_inf = adam->common.found_inf] {
    if (found_inf != nullptr && *found_inf != 0) {
      return;
    }
    for (const PydistCudaAdamSegment& given : segments) {
      pydist::StepSegment segment = step_segment(given);
      segment.states[0] = given.exp_avg;
      segment.states[1] = given.exp_avg_sq;
      segment.states[2] = given.max_exp_avg_sq;
      pydist::adam_step(factors, segment);
    }
  });
  return 0;
}

int pydist_cuda_sgd(const PydistCudaSgd* sgd, void* stream) {
  const pydist::SgdFactors factors =
      pydist::factors_of({.lr = sgd->common.lr,
                          .momentum = sgd->momentum,
                          .dampening = sgd->dampening,
                          .weight_decay = sgd->common.weight_decay,
                          .nesterov = sgd->nesterov != 0,
                          .maximize = sgd->common.maximize != 0},
                         sgd->first_step != 0, sgd->common.gradient_scale);
  const std::vector<PydistCudaSgdSegment> segments(sgd->segments,
                                                   sgd->segments + sgd->segment_count);
  enqueue(stream, [factors, segments, found_inf = sgd->common.found_inf] {
    if (found_inf != nullptr && *found_inf != 0) {
      return;
    }
    for (const PydistCudaSgdSegment& given : segments) {
      pydist::StepSegment segment = step_segment(given);
      segment.states[0] = given.momentum;
      pydist::sgd_step(factors, segment);
    }
  });
  return 0;
}
}
