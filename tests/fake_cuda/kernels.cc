// The kernels of the fake CUDA device: torch's own for the CPU, on tensors that share the memory of
// the device's.
//
// Most run on the calling thread, once the current stream has done what it was given. A few that
// write in place, copies among them, run on the stream itself, later: so what does not wait for the
// stream sees old values. Those alone become part of a graph that is captured, where they write to
// memory that was there before; what a capture computes in memory of its own, it computes at once.

#include <ATen/ExpandUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/record_stream_native.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memory.h"
#include "streams.h"

namespace fake_cuda {
namespace {

const c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);
const c10::DispatchKeySet kCuda(c10::DispatchKey::CUDA);

// Those that write into an argument, "out" or the first one.
constexpr std::array<std::string_view, 14> kOnTheStream{
    "aten::copy_", "aten::zero_", "aten::fill_",   "aten::neg_",    "aten::add",
    "aten::sub",   "aten::mul",   "aten::div",     "aten::addcmul", "aten::addcdiv",
    "aten::neg",   "aten::sqrt",  "aten::maximum", "aten::minimum"};

// Those for whose values, or numbers of elements, the host waits.
constexpr std::array<std::string_view, 7> kReadByTheHost{
    "aten::_local_scalar_dense", "aten::equal",    "aten::is_nonzero",       "aten::nonzero",
    "aten::masked_select",       "aten::_unique2", "aten::repeat_interleave"};

at::Tensor make_tensor(c10::Storage storage, c10::DispatchKeySet key, const at::Tensor& like) {
  at::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), key, like.dtype());
  auto* const impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_complex()) {
    tensor._set_conj(like.is_conj());
  }
  tensor._set_neg(like.is_neg());
  return tensor;
}

// The tensors of one call, on the CPU and on the device.
class Call {
 public:
  // Whether the tensors on the CPU keep the storages of those on the device. Those that wait in a
  // stream or a graph keep the memory alone: nobody is to see a storage in use by CUDA's kernels.
  explicit Call(bool keeps_storages) : keeps_storages_(keeps_storages) {}

  // Shares the memory of a tensor on the device; any other stays as it is.
  at::Tensor on_cpu(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) {
      return tensor;
    }
    device_ = device_ ? *device_ : tensor.device().index();
    auto& [original, alias] = tensors_[tensor.unsafeGetTensorImpl()];
    if (!original.defined()) {
      original = tensor;
      alias = make_tensor(alias_of(tensor.storage()), kCpu, tensor);
    }
    return alias;
  }

  // A result: one of the arguments, a view of one, or new memory.
  at::Tensor on_device(const at::Tensor& result) {
    if (!result.defined() || !result.is_cpu() || !device_) {
      return result;
    }
    for (const auto& [impl, pair] : tensors_) {
      if (pair.second.is_same(result)) {
        return pair.first;
      }
    }
    for (const auto& [impl, pair] : storages_) {
      if (pair.second.unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl()) {
        return make_tensor(pair.first, kCuda, result);
      }
    }
    c10::Storage storage(c10::Storage::use_byte_size_t(), result.storage().nbytes(),
                         move_to_device(result.storage(), *device_),
                         c10::GetAllocator(c10::DeviceType::CUDA), /*resizable=*/true);
    storages_.emplace(storage.unsafeGetStorageImpl(), std::pair(storage, result.storage()));
    return make_tensor(std::move(storage), kCuda, result);
  }

  // Changes of shape and memory, as by resize_() and set_(), reach the tensors on the device.
  void write_back() {
    for (auto& [impl, pair] : storages_) {
      auto& [original, alias] = pair;
      if (alias.data() != original.data()) {
        original.set_data_ptr_noswap(move_to_device(alias, original.device().index()));
        original.set_nbytes(alias.nbytes());
      }
    }
    for (auto& [impl, pair] : tensors_) {
      auto& [original, alias] = pair;
      auto* const target = original.unsafeGetTensorImpl();
      if (alias.sizes() != original.sizes() || alias.strides() != original.strides() ||
          alias.storage_offset() != original.storage_offset()) {
        target->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
      }
    }
  }

  void place_on(c10::Device device) {
    if (device.is_cuda()) {
      device_ = device.has_index() ? device.index() : current_device();
    }
  }
  [[nodiscard]] bool has_device() const { return device_.has_value(); }
  [[nodiscard]] c10::Stream stream() const { return current_stream(device_.value_or(0)); }

 private:
  c10::Storage alias_of(const c10::Storage& storage) {
    auto& [original, alias] = storages_[storage.unsafeGetStorageImpl()];
    if (!original) {
      original = storage;
      using Held = std::pair<c10::Storage, std::shared_ptr<void>>;
      auto* const held = keeps_storages_ ? new Held(storage, nullptr)
                                         : new Held(c10::Storage(), keep(storage.data_ptr()));
      c10::DataPtr data(
          storage.mutable_data(), held, [](void* holder) { delete static_cast<Held*>(holder); },
          c10::Device(c10::DeviceType::CPU));
      alias = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data),
                           c10::GetAllocator(c10::DeviceType::CPU), /*resizable=*/true);
    }
    return alias;
  }

  const bool keeps_storages_;
  std::optional<c10::DeviceIndex> device_;
  // Of the device, and its alias on the CPU.
  std::unordered_map<const void*, std::pair<at::Tensor, at::Tensor>> tensors_;
  std::unordered_map<const void*, std::pair<c10::Storage, c10::Storage>> storages_;
};

// `value` with every tensor in it replaced by `replace` of it.
template <typename Replace>
c10::IValue with_tensors(const c10::IValue& value, const Replace& replace) {
  if (value.isTensor()) {
    return replace(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      tensors.push_back(replace(tensor));
    }
    return tensors;
  }
  if (value.isList()) {
    const c10::List<c10::IValue> items = value.toList();
    c10::impl::GenericList replaced(items.elementType());
    for (const c10::IValue& item : items) {
      replaced.push_back(with_tensors(item, replace));
    }
    return replaced;
  }
  return value;
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.redispatchBoxed(kCpu, stack);
}

// Whether an operator only makes views, which needs no data.
bool makes_views(const c10::FunctionSchema& schema) {
  const auto& results = schema.returns();
  return !results.empty() && std::all_of(results.begin(), results.end(), [](const auto& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
}

// Whether the stream is captured into a graph, by the fake driver (tests/fakes), which then keeps
// the job.
bool is_recorded(Queue& queue, const std::function<void()>& job) {
  using Record = int (*)(void*, const std::function<void()>*);
  const auto record = reinterpret_cast<Record>(::dlsym(RTLD_DEFAULT, "fake_driver_record"));
  return record != nullptr && record(&queue, &job) != 0;
}

// Runs the operator on the stream, if it is one that can; returns whether it is.
bool run_on_stream(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& names = kOnTheStream;
  const c10::FunctionSchema& schema = op.schema();
  if (std::find(names.begin(), names.end(), schema.name()) == names.end()) {
    return false;
  }
  const std::size_t count = schema.arguments().size();
  const auto arguments = torch::jit::last(*stack, count);
  const c10::Argument& last = schema.arguments().back();
  const bool has_out = last.is_out();
  if (!has_out && !schema.name().ends_with('_')) {
    return false;
  }
  const at::Tensor self = arguments[has_out ? count - 1 : 0].toTensor();
  bool fits = true;
  // Whether an input has all of the result's elements, so that it keeps its shape.
  bool is_full = !has_out;
  // Whether the caller may go on before the stream has come so far.
  bool is_awaited = false;
  Call call(/*keeps_storages=*/false);
  torch::jit::Stack later;
  const bool is_copy = schema.name() == "aten::copy_";
  const bool is_non_blocking = is_copy && arguments[2].toBool();
  for (std::size_t i = 0; i < count; ++i) {
    later.push_back(with_tensors(arguments[i], [&](const at::Tensor& tensor) {
      is_full = is_full || (tensor.defined() && i + 1 < count && tensor.sizes() == self.sizes());
      fits = fits && tensor.defined() && at::is_expandable_to(tensor.sizes(), self.sizes()) &&
             c10::canCast(tensor.scalar_type(), self.scalar_type());
      if (!tensor.defined() || tensor.is_cuda()) {
        return call.on_cpu(tensor);
      }
      if (is_copy && is_pinned(tensor.const_data_ptr())) {
        is_awaited = is_awaited || !is_non_blocking;
        return tensor;
      }
      // Ordinary memory: CUDA has read it, or written it, when the call returns.
      is_awaited = is_awaited || is_copy;
      if (is_copy) {
        return tensor;
      }
      at::Tensor now = tensor.clone();
      now.unsafeGetTensorImpl()->set_wrapped_number(
          tensor.unsafeGetTensorImpl()->is_wrapped_number());
      return now;
    }));
  }
  if (!fits || !is_full || !call.has_device()) {
    return false;
  }
  if (is_copy && self.is_cuda() && arguments[1].toTensor().is_cuda() &&
      arguments[1].toTensor().device() != self.device()) {
    // Between devices CUDA waits for both streams, and both wait for the copy.
    Queue::of(current_stream(arguments[1].toTensor().device().index())).drain();
    is_awaited = true;
  }
  Queue& queue = Queue::of(call.stream());
  // A replay runs it once more.
  const std::function<void()> job = [op, later = std::move(later)] {
    torch::jit::Stack once = later;
    run_on_cpu(op, &once);
  };
  const bool is_at_once = is_of_capture(self.storage().data_ptr());
  if (is_at_once || !is_recorded(queue, job)) {
    queue.post(job);
    if (is_awaited) {
      note_host_wait(schema.name());
    }
    if (is_awaited || is_at_once) {
      queue.drain();
    }
  }
  torch::jit::drop(*stack, count);
  stack->emplace_back(self);
  return true;
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  if (run_on_stream(op, stack)) {
    return;
  }
  const c10::FunctionSchema& schema = op.schema();
  const std::size_t count = schema.arguments().size();
  Call call(/*keeps_storages=*/true);
  const std::size_t begin = stack->size() - count;
  for (std::size_t i = begin; i < stack->size(); ++i) {
    c10::IValue& argument = (*stack)[i];
    if (argument.isDevice()) {
      call.place_on(argument.toDevice());
      argument = c10::Device(c10::DeviceType::CPU);
    } else {
      argument =
          with_tensors(argument, [&](const at::Tensor& tensor) { return call.on_cpu(tensor); });
    }
  }
  if (std::find(kReadByTheHost.begin(), kReadByTheHost.end(), schema.name()) !=
      kReadByTheHost.end()) {
    note_host_wait(schema.name());
  }
  if (call.has_device() && !makes_views(schema)) {
    Queue::of(call.stream()).drain();
  }
  run_on_cpu(op, stack);
  call.write_back();
  for (std::size_t i = begin; i < stack->size(); ++i) {
    (*stack)[i] =
        with_tensors((*stack)[i], [&](const at::Tensor& tensor) { return call.on_device(tensor); });
  }
}

bool is_there(const c10::IValue& tensor) {
  return tensor.isTensor() && tensor.toTensor().defined();
}

// CUDA's kernel asserts what the CPU's does without. (Its fused form, which has the gradient of the
// input too, asks for less.)
void batch_norm_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack* stack) {
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  constexpr std::size_t kWeight = 2;
  constexpr std::size_t kSaveMean = 5;
  constexpr std::size_t kSaveInvstd = 6;
  constexpr std::size_t kOutputMask = 9;
  TORCH_CHECK(is_there(arguments[kSaveMean]), "save_mean should always be defined");
  TORCH_CHECK(is_there(arguments[kSaveInvstd]), "save_invstd should always be defined");
  const c10::List<bool> mask = arguments[kOutputMask].toBoolList();
  TORCH_CHECK(is_there(arguments[kWeight]) || !(mask[1] || mask[2]),
              "without a weight there are no gradients of weight and bias");
  run(op, keys, stack);
}

void record_stream_of_storage(at::Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("record_stream", &record_stream_of_storage);
  m.impl("native_batch_norm_backward",
         torch::CppFunction::makeFromBoxedFunction<&batch_norm_backward>());
  // Those that torch has written for all devices, and that then look for the device's own.
  for (const char* const name : {"copy_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
  }
}

}  // namespace
}  // namespace fake_cuda
