// Copies a gradient to where it travels from.
//
// A large one leaves the caches before its bucket is sent. Ordinary stores would first read every
// line that they are about to overwrite; these write past the caches.

#pragma once

#include <ATen/core/Tensor.h>

namespace pydist {

// Copies `source` to `target` if both are large, dense, and alike; false where that is not so, and
// nothing has happened. No version is counted.
[[nodiscard]] bool try_large_copy(const at::Tensor& target, const at::Tensor& source);

}  // namespace pydist
