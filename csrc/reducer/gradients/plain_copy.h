// Copies a gradient to where it travels from, without torch's dispatcher, which takes longer than
// to copy a small one.
//
// A large one leaves the caches before its bucket is sent. Ordinary stores would first read every
// line that they are about to overwrite; these write past the caches.

#pragma once

#include <ATen/core/Tensor.h>

namespace pydist {

// Copies `source` to `target` if both are on the CPU, dense, and alike; false where that is not so,
// and nothing has happened. No version is counted.
[[nodiscard]] bool try_plain_copy(const at::Tensor& target, const at::Tensor& source);

}  // namespace pydist
