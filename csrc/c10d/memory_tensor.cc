#include "c10d/memory_tensor.h"

#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "c10d/device_streams.h"

namespace pydist {
namespace {

at::Tensor make_tensor(c10::DataPtr data, std::size_t bytes, at::IntArrayRef shape,
                       at::ScalarType dtype) {
  const auto key = data.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(data),
                       /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return tensor;
}

}  // namespace

at::Tensor tensor_over(MemoryPtr memory, at::IntArrayRef shape, at::ScalarType dtype,
                       Device device) {
  void* const data = memory->data();
  const std::size_t bytes = memory->bytes();
  auto held = std::make_unique<MemoryPtr>(std::move(memory));
  c10::DataPtr owned(
      data, held.release(), [](void* holder) { delete static_cast<MemoryPtr*>(holder); },
      torch_device(device));
  return make_tensor(std::move(owned), bytes, shape, dtype);
}

at::Tensor borrow_bytes(void* data, std::size_t bytes, Device device) {
  return make_tensor(c10::DataPtr(data, torch_device(device)), bytes,
                     {static_cast<std::int64_t>(bytes)}, at::kByte);
}

}  // namespace pydist
