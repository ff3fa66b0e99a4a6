// Memory that torch did not allocate as a tensor, on the CPU or a CUDA device.
//
// Made by hand: at::from_blob asks CUDA whose memory it is, which not every torch with such tensors
// can (tests/fake_cuda).

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>

#include "base/buffer.h"
#include "communicator/communicator.h"

namespace pydist {

// Contiguous, and as long as `memory` lives; `device` is where that is.
[[nodiscard]] at::Tensor tensor_over(MemoryPtr memory, at::IntArrayRef shape, at::ScalarType dtype,
                                     Device device);

// One-dimensional, of bytes; the caller keeps the memory alive.
[[nodiscard]] at::Tensor borrow_bytes(void* data, std::size_t bytes, Device device);

}  // namespace pydist
