#include "reducer/gradients/plain_copy.h"

#include <cstddef>
#include <cstdint>

#include "c10d/torch_threads.h"
#include "kernels/cpu/reduce.h"

namespace pydist {
namespace {

// Of what is smaller, a core's own cache may still hold a part when it is sent. Copied and averaged
// by two ranks, gradients of 256 KiB gained nothing, those of 1 MiB a sixth, of 4 and 16 MiB a
// fifth.
constexpr std::size_t kLargeBytes = std::size_t{2} << 20;
// A thread more is worth it for so many bytes.
constexpr std::int64_t kBytesOfAThread = std::int64_t{1} << 20;

// Whether its elements lie in memory of the CPU as they are.
bool is_plain(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch() && !tensor._is_zerotensor() &&
         !tensor.is_conj() && !tensor.is_neg() && tensor.is_non_overlapping_and_dense();
}

}  // namespace

bool try_plain_copy(const at::Tensor& target, const at::Tensor& source) {
  if (!is_plain(source) || !is_plain(target) || source.scalar_type() != target.scalar_type() ||
      source.sizes() != target.sizes() || source.strides() != target.strides()) {
    return false;
  }
  auto* const to = static_cast<std::byte*>(target.mutable_data_ptr());
  const auto* const from = static_cast<const std::byte*>(source.const_data_ptr());
  if (target.nbytes() < kLargeBytes) {
    copy_bytes(to, from, target.nbytes());
    return true;
  }
  on_torch_threads(static_cast<std::int64_t>(target.nbytes()), kBytesOfAThread,
                   [to, from](std::int64_t first, std::int64_t last) {
                     copy_bytes(to + first, from + first, static_cast<std::size_t>(last - first),
                                StoreHint::kStreaming);
                   });
  return true;
}

}  // namespace pydist
