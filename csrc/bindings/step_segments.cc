#include "bindings/step_segments.h"

#include <algorithm>

#include "c10d/device_streams.h"
#include "c10d/tensors.h"
#include "c10d/torch_threads.h"

namespace pydist {
namespace {

// A thread takes at least so many elements: fewer are done sooner than another thread has begun.
constexpr std::int64_t kElementsPerThread = 32 * 1024;
// Threads get whole blocks of so many elements.
constexpr std::int64_t kBlock = 1024;

}  // namespace

struct StepSegments::MemoryRange {
  const std::byte* begin;
  const std::byte* end;
  const Role* role;
  std::size_t segment;
};

StepSegments::StepSegments(const char* function, const TensorsArgument& parameters,
                           const TensorsArgument& gradients, const OptionalTensors& masters)
    : function_(function), parameters_(&parameters.tensors), has_masters_(masters.has_value()) {
  segments_.resize(parameters_->size());
  if (!segments_.empty() && parameters_->front().defined()) {
    const c10::Device device = parameters_->front().device();
    // Others are refused below.
    device_ = device.is_cuda() ? device_of(device) : Device{};
  }
  add({"parameters", parameters_, /*is_written=*/true});
  add({"gradients", &gradients.tensors, /*is_written=*/false});
  if (masters) {
    add({"masters", &masters->tensors, /*is_written=*/true});
  }
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    StepSegment& segment = segments_[i];
    const at::Tensor& parameter = (*parameters_)[i];
    segment.parameter_dtype = supported(roles_[0], i);
    segment.gradient_dtype = supported(roles_[1], i);
    try {
      require_step_types(segment.parameter_dtype, segment.gradient_dtype, has_masters_);
    } catch (const InvalidUsage& error) {
      throw InvalidUsage(join(function_, ": parameters[", i, "]: ", error.what(), "."));
    }
    if (device_.type == DeviceType::kCuda && segment.parameter_dtype == DType::kFloat64) {
      throw InvalidUsage(join(label(roles_[0], i),
                              " is of type Double; the fused optimizer step on CUDA devices takes "
                              "float16, bfloat16 and float32 parameters."));
    }
    segment.count = static_cast<std::size_t>(parameter.numel());
    segment.parameter = parameter.mutable_data_ptr();
    segment.gradient = gradients.tensors[i].const_data_ptr();
    if (has_masters_) {
      require_type(roles_[2], i);
      segment.master = masters->tensors[i].mutable_data_ptr();
    }
  }
}

void StepSegments::add_states(const char* name, const std::vector<at::Tensor>& tensors) {
  add({name, &tensors, /*is_written=*/true});
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    require_type(roles_.back(), i);
    segments_[i].states[state_count_] = tensors[i].mutable_data_ptr();
  }
  ++state_count_;
}

void StepSegments::add(const Role& role) {
  if (role.tensors->size() != segments_.size()) {
    throw InvalidUsage(join(function_, ": ", role.name, " holds ", role.tensors->size(),
                            " tensors, parameters ", segments_.size(),
                            "; every parameter needs one of each."));
  }
  const c10::Device expected = torch_device(device_);
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    const at::Tensor& tensor = (*role.tensors)[i];
    const at::Tensor& parameter = (*parameters_)[i];
    if (!tensor.defined() || !(tensor.is_cpu() || tensor.is_cuda()) ||
        tensor.layout() != at::kStrided || !tensor.is_contiguous() || tensor.is_neg()) {
      throw InvalidUsage(join(label(role, i), " must be a contiguous CPU or CUDA tensor."));
    }
    if (tensor.device() != expected) {
      throw InvalidUsage(join(label(role, i), " is on ", tensor.device().str(),
                              ", parameters[0] on ", expected.str(),
                              "; all tensors of a step must be on one device."));
    }
    if (tensor.sizes() != parameter.sizes()) {
      throw InvalidUsage(join(label(role, i), " has shape ", tensor.sizes(), ", its parameter ",
                              parameter.sizes(), "."));
    }
  }
  roles_.push_back(role);
}

DType StepSegments::supported(const Role& role, std::size_t segment) const {
  const at::ScalarType type = (*role.tensors)[segment].scalar_type();
  const std::optional<DType> dtype = dtype_of(type);
  if (!dtype) {
    throw InvalidUsage(join(label(role, segment), " is of type ", type,
                            "; an optimizer step takes floating-point types."));
  }
  return *dtype;
}

// Masters and states are of the type that the step is computed in.
void StepSegments::require_type(const Role& role, std::size_t segment) const {
  const at::ScalarType expected =
      segments_[segment].parameter_dtype == DType::kFloat64 ? at::kDouble : at::kFloat;
  const at::ScalarType type = (*role.tensors)[segment].scalar_type();
  if (type != expected) {
    throw InvalidUsage(join(label(role, segment), " is of type ", type, ", expected ", expected,
                            " for a parameter of type ", (*parameters_)[segment].scalar_type(),
                            "."));
  }
}

std::string StepSegments::label(const Role& role, std::size_t segment) const {
  return join(function_, ": ", role.name, "[", segment, "]");
}

void StepSegments::require_apart() const {
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
  // Among the ranges before this one: the range that reaches furthest, and the written range that
  // does. Several gradients may be one tensor.
  const MemoryRange* furthest = nullptr;
  const MemoryRange* furthest_written = nullptr;
  for (const MemoryRange& range : ranges) {
    const MemoryRange* const before = range.role->is_written ? furthest : furthest_written;
    if (before != nullptr && range.begin < before->end) {
      throw InvalidUsage(join(label(*before->role, before->segment), " and ", range.role->name, "[",
                              range.segment, "] share memory; what a step writes must lie apart."));
    }
    if (furthest == nullptr || range.end > furthest->end) {
      furthest = &range;
    }
    if (range.role->is_written &&
        (furthest_written == nullptr || range.end > furthest_written->end)) {
      furthest_written = &range;
    }
  }
}

void StepSegments::for_each_part(
    const std::function<void(std::size_t index, const StepSegment& part)>& step,
    StepThreads* threads) const {
  std::vector<std::size_t> ends;
  ends.reserve(segments_.size());
  std::size_t total = 0;
  for (const StepSegment& segment : segments_) {
    ends.push_back(total += segment.count);
  }
  const auto blocks = (static_cast<std::int64_t>(total) + kBlock - 1) / kBlock;
  const StepThreads::Range range = [&](std::int64_t first, std::int64_t last) {
    auto begin = static_cast<std::size_t>(first * kBlock);
    const std::size_t end = std::min(total, static_cast<std::size_t>(last * kBlock));
    auto index =
        static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    for (; begin < end; ++index) {
      const std::size_t start = ends[index] - segments_[index].count;
      const std::size_t stop = std::min(end, ends[index]);
      if (begin < stop) {
        step(index, segments_[index].part(begin - start, stop - begin));
        begin = stop;
      }
    }
  };
  if (threads != nullptr) {
    threads->run(blocks, kElementsPerThread / kBlock, range);
  } else {
    on_torch_threads(blocks, kElementsPerThread / kBlock, range);
  }
}

void StepSegments::bump_versions() const {
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

}  // namespace pydist
