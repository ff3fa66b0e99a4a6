// Memory that torch did not allocate as a tensor, on the CPU or a CUDA device.
//
// Made by hand: at::from_blob asks CUDA whose memory it is, which not every torch with such tensors
// can (tests/fake_cuda).

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/buffer.h"
#include "communicator/communicator.h"

namespace pydist {

// Memory of one of torch's allocators.
class AllocatedMemory final : public Memory {
 public:
  AllocatedMemory(c10::DataPtr data, std::size_t bytes) : data_(std::move(data)), bytes_(bytes) {}

  [[nodiscard]] void* data() const noexcept override { return data_.get(); }
  [[nodiscard]] std::size_t bytes() const noexcept override { return bytes_; }
  [[nodiscard]] bool is_symmetric() const noexcept override { return false; }

 private:
  const c10::DataPtr data_;
  const std::size_t bytes_;
};

// A contiguous tensor over `memory`, which lies on `device` and lives as long as the tensor.
[[nodiscard]] at::Tensor tensor_over(MemoryPtr memory, at::IntArrayRef shape, at::ScalarType dtype,
                                     Device device);

// One-dimensional, of bytes; the caller keeps the memory alive.
[[nodiscard]] at::Tensor borrow_bytes(void* data, std::size_t bytes, Device device);

// `count` elements of a one-dimensional, contiguous tensor from `begin` on, with a storage of their
// own. How often that storage is used says who holds these elements. It keeps the tensor's memory
// alive, but not the tensor.
[[nodiscard]] at::Tensor part_with_storage(const at::Tensor& whole, std::int64_t begin,
                                           std::int64_t count);

// Moves all who share a tensor's storage, this tensor among them, into new memory with the same
// values, in the order of the current stream. Returns a tensor like it over the memory that they
// had. The tensor is dense and fills its storage.
[[nodiscard]] at::Tensor move_holders(const at::Tensor& tensor);

}  // namespace pydist
