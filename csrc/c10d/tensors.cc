#include "c10d/tensors.h"

#include <ATen/Dispatch_v2.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>

#include "base/error.h"
#include "c10d/device_streams.h"

namespace pydist {
namespace {

// How long results in dense copies may take to be copied within a device.
constexpr std::chrono::minutes kFinishPatience{10};

// In the order of DType. Float8, which is several types to torch, is moved as bytes.
constexpr std::array<at::ScalarType, kDTypeCount> kScalarTypes = {
    at::kDouble, at::kFloat,        at::kHalf,          at::kBFloat16, at::kChar,   at::kShort,
    at::kInt,    at::kLong,         at::kByte,          at::kUInt16,   at::kUInt32, at::kUInt64,
    at::kBool,   at::kComplexFloat, at::kComplexDouble, at::kByte};

constexpr auto kScalarTypeCount = static_cast<std::size_t>(at::ScalarType::NumOptions);

// The same from the other side, by torch's number of the type. Every operation looks here.
constexpr std::array<std::optional<DType>, kScalarTypeCount> kDTypes = [] {
  std::array<std::optional<DType>, kScalarTypeCount> dtypes{};
  for (std::size_t i = kScalarTypes.size(); i-- > 0;) {  // so that bytes are kUInt8
    dtypes.at(static_cast<std::size_t>(kScalarTypes.at(i))) = static_cast<DType>(i);
  }
  return dtypes;
}();

bool is_dense(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// What torch can divide there.
bool is_divisible_on_device(at::ScalarType type) noexcept {
  return type != at::kUInt16 && type != at::kUInt32 && type != at::kUInt64;
}

template <typename Integer>
void divide_elements(const at::Tensor& dense, std::int64_t divisor) {
  // Holds every value of Integer and the divisor.
  using Wide = std::common_type_t<Integer, std::int64_t>;
  Integer* const values = dense.mutable_data_ptr<Integer>();
  const std::int64_t count = dense.numel();
  for (std::int64_t i = 0; i < count; ++i) {
    values[i] = static_cast<Integer>(static_cast<Wide>(values[i]) / static_cast<Wide>(divisor));
  }
}

// Of a dense tensor of integers: each quotient without its fraction, as C++ and NCCL divide.
void divide(const at::Tensor& dense, std::int64_t divisor) {
  if (!dense.is_cpu()) {
    if (dense.itemsize() == 1 && divisor > std::numeric_limits<std::int8_t>::max()) {
      dense.copy_(dense.to(at::kInt).div(divisor, "trunc"));
    } else {
      dense.div_(divisor, "trunc");
    }
    return;
  }
  AT_DISPATCH_V2(dense.scalar_type(), "divide",
                 AT_WRAP([&] { divide_elements<scalar_t>(dense, divisor); }),
                 AT_EXPAND(AT_INTEGRAL_TYPES_V2));
}

}  // namespace

std::optional<DType> dtype_of(at::ScalarType type) noexcept {
  const auto number = static_cast<std::size_t>(type);
  return number < kDTypes.size() ? kDTypes[number] : std::nullopt;
}

at::ScalarType scalar_type_of(DType dtype) noexcept {
  return kScalarTypes.at(static_cast<std::size_t>(dtype));
}

bool is_averaged_by_division(at::ScalarType type) noexcept {
  return at::isIntegralType(type, /*includeBool=*/false);
}

void require_arithmetic(const at::Tensor& tensor, OpKind kind, ReduceOp op) {
  if (!dtype_of(tensor.scalar_type())) {
    throw InvalidUsage(join(to_string(kind), ": op '", to_string(op), "' is not defined for torch.",
                            at::toString(tensor.scalar_type()),
                            ", which can be moved but not reduced; convert it first."));
  }
}

// Of memory on a device.
class DenseTensors::Owner final : public BufferOwner {
 public:
  explicit Owner(std::vector<c10::Storage> storages) : storages_(std::move(storages)) {}

  [[nodiscard]] std::vector<Block> blocks() const override {
    std::vector<Block> blocks;
    for (const c10::Storage& storage : storages_) {
      blocks.push_back({storage.data(), storage.nbytes()});
    }
    return blocks;
  }

 private:
  const std::vector<c10::Storage> storages_;
};

void DenseTensors::attach_to(Operation& operation) {
  operation.stream = stream_;
  if (is_on_device() && owner_ == nullptr) {
    owner_ = std::make_shared<const Owner>(std::move(storages_));
  }
  operation.owner = owner_;
}

bool DenseTensors::is_captured() const { return torch_stream_ && is_capturing(*torch_stream_); }

Buffer DenseTensors::buffer_of(const at::Tensor& dense, void* data) {
  const auto count = static_cast<std::size_t>(dense.numel());
  if (data == nullptr && count != 0) {
    throw InvalidUsage(join("A tensor of ", count,
                            " elements has no memory of its own: pass a "
                            "plain tensor, not a fake or wrapped one (of a DTensor, its "
                            "to_local())."));
  }
  Buffer buffer{.data = data, .count = count, .dtype = DType::kFloat8, .device = {}};
  if (!dense.is_cpu()) {
    buffer.device = device_of(dense.device());
    if (!torch_stream_) {
      torch_stream_ = current_stream(buffer.device);
      stream_ = torch_stream_->native_handle();
    }
  }
  if (const auto dtype = dtype_of(dense.scalar_type())) {
    buffer.dtype = *dtype;
  } else {
    // One element may be several bytes here (complex32); blocks still divide as they should.
    buffer.count *= dense.itemsize();
  }
  return buffer;
}

void DenseTensors::require_movable(const at::Tensor& tensor) const {
  if (!tensor.defined()) {
    throw InvalidUsage("Expected a tensor, got an undefined one.");
  }
  const bool is_taken = tensor.is_cpu()
                            ? communicator_->takes(DeviceType::kCpu)
                            : tensor.is_cuda() && communicator_->takes(DeviceType::kCuda);
  if (!is_taken) {
    const bool takes_cpu = communicator_->takes(DeviceType::kCpu);
    throw InvalidUsage(join("This group moves ", takes_cpu ? "CPU" : "CUDA",
                            " tensors, and got one on ", tensor.device().str(), ": move it with ",
                            takes_cpu ? ".cpu()" : ".cuda()",
                            ", or use a backend for that device, as in "
                            "init_process_group(\"cpu:pydist,cuda:nccl\")."));
  }
  if (tensor.layout() != at::kStrided) {
    throw InvalidUsage(
        "Expected a dense tensor, got a sparse one; only all_reduce through "
        "torch.distributed takes sparse tensors. Convert it with .to_dense().");
  }
  if (tensor.is_quantized()) {
    throw InvalidUsage("Quantized tensors cannot be moved: pass their int_repr().");
  }
}

void DenseTensors::hold(const at::Tensor& tensor) {
  if ((lifetime_ == Lifetime::kHeld || !tensor.is_cpu()) && tensor.has_storage()) {
    storages_.push_back(tensor.storage());
  }
}

Buffer DenseTensors::input(const at::Tensor& tensor) {
  require_movable(tensor);
  if (is_dense(tensor)) {
    hold(tensor);
    return buffer_of(tensor, const_cast<void*>(tensor.const_data_ptr()));
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  const at::Tensor dense = tensor.resolve_conj().resolve_neg().contiguous();
  const Buffer buffer = buffer_of(dense, dense.mutable_data_ptr());
  storages_.push_back(dense.storage());
  return buffer;
}

Buffer DenseTensors::output(const at::Tensor& tensor, std::int64_t divisor) {
  require_movable(tensor);
  if (divisor != 1 && !tensor.is_cpu() && !is_divisible_on_device(tensor.scalar_type())) {
    throw InvalidUsage(join("op 'mean' is not defined for torch.",
                            at::toString(tensor.scalar_type()),
                            " on a GPU: torch cannot divide it there; convert the tensor first."));
  }
  // An alias of the target, so that releasing it never touches the user's Python object.
  if (is_dense(tensor)) {
    hold(tensor);
    if (divisor != 1) {
      unfinished_.push_back({tensor.alias(), at::Tensor(), divisor});
    }
    return buffer_of(tensor, tensor.mutable_data_ptr());
  }
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    throw InvalidUsage(
        "The result cannot be written to an expanded tensor, whose elements share "
        "memory: pass its .clone() or .contiguous().");
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor dense = at::empty(tensor.sizes(), tensor.options());
  const Buffer buffer = buffer_of(dense, dense.mutable_data_ptr());
  storages_.push_back(dense.storage());
  unfinished_.push_back({tensor.alias(), std::move(dense), divisor});
  return buffer;
}

std::vector<Buffer> DenseTensors::inputs(const std::vector<at::Tensor>& tensors) {
  std::vector<Buffer> buffers;
  buffers.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    buffers.push_back(input(tensor));
  }
  return buffers;
}

std::vector<Buffer> DenseTensors::outputs(const std::vector<at::Tensor>& tensors) {
  std::vector<Buffer> buffers;
  buffers.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    buffers.push_back(output(tensor));
  }
  return buffers;
}

void DenseTensors::finish_outputs() const {
  if (unfinished_.empty()) {
    return;
  }
  // Below autograd: the results of a collective have no history, and a leaf that requires a
  // gradient may be received into.
  const at::AutoDispatchBelowADInplaceOrView guard;
  for (const Unfinished& each : unfinished_) {
    if (each.divisor != 1) {
      divide(each.dense.defined() ? each.dense : each.target, each.divisor);
    }
    if (each.dense.defined()) {
      each.target.copy_(each.dense);
    }
  }
}

void DenseTensors::finish_outputs_and_wait() const {
  if (unfinished_.empty() || unfinished_[0].target.is_cpu()) {
    finish_outputs();
    return;
  }
  const c10::Stream stream = high_priority_stream(device_of(unfinished_[0].target.device()));
  const c10::StreamGuard guard(stream);
  finish_outputs();
  if (!wait_on_host(*record_event(stream), Deadline::in(kFinishPatience))) {
    throw Timeout("The device timed out in copying the results into place.");
  }
}

}  // namespace pydist
