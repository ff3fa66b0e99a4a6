#include "c10d/memory_tensor.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "c10d/device_streams.h"

namespace pydist {
namespace {

// One-dimensional and empty so far.
at::Tensor make_tensor(c10::DataPtr data, std::size_t bytes, at::ScalarType dtype) {
  const auto key = data.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(data),
                       /*allocator=*/nullptr, /*resizable=*/false);
  return at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                  c10::scalarTypeToTypeMeta(dtype));
}

at::Tensor make_tensor(c10::DataPtr data, std::size_t bytes, at::IntArrayRef shape,
                       at::ScalarType dtype) {
  at::Tensor tensor = make_tensor(std::move(data), bytes, dtype);
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

at::Tensor part_with_storage(const at::Tensor& whole, std::int64_t begin, std::int64_t count) {
  const std::size_t element = whole.itemsize();
  auto* const data =
      static_cast<std::byte*>(whole.mutable_data_ptr()) + static_cast<std::size_t>(begin) * element;
  auto held = std::make_unique<c10::Storage>(whole.storage());
  c10::DataPtr part(
      data, held.release(), [](void* holder) { delete static_cast<c10::Storage*>(holder); },
      whole.device());
  return make_tensor(std::move(part), static_cast<std::size_t>(count) * element, {count},
                     whole.scalar_type());
}

at::Tensor move_holders(const at::Tensor& tensor) {
  at::Tensor elsewhere =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()).copy_(tensor);
  c10::StorageImpl& theirs = *tensor.storage().unsafeGetStorageImpl();
  c10::DataPtr memory = theirs.set_data_ptr(
      elsewhere.storage().set_data_ptr(c10::DataPtr(/*data=*/nullptr, tensor.device())));
  at::Tensor left = make_tensor(std::move(memory), theirs.nbytes(), tensor.scalar_type());
  left.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return left;
}

}  // namespace pydist
