// PYDIST_DEBUG=1 compares the averaged gradients of all ranks.

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <utility>

#include "base/digest.h"
#include "base/error.h"
#include "reducer/reducer.h"

namespace pydist {
namespace {

void add_bytes(Digest& digest, const at::Tensor& tensor) {
  const at::Tensor dense = tensor.cpu().contiguous();
  const auto* const bytes = static_cast<const unsigned char*>(dense.const_data_ptr());
  for (std::size_t i = 0; i < dense.nbytes(); i += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes + i, std::min(sizeof(word), dense.nbytes() - i));
    digest.add(word);
  }
}

std::uint64_t digest_of(const at::Tensor& tensor) {
  Digest digest;
  if (tensor.is_sparse()) {
    const at::Tensor coalesced = tensor.coalesce();
    add_bytes(digest, coalesced.indices());
    add_bytes(digest, coalesced.values());
  } else {
    add_bytes(digest, tensor);
  }
  return digest.value();
}

}  // namespace

// Compares the gradients that the optimizers are going to see. Returns the error if they differ, on
// every rank.
std::exception_ptr Reducer::compare_gradients() {
  const auto count = static_cast<std::int64_t>(arena_.slots().size());
  const std::int64_t size = communicator_->size();
  at::Tensor all = at::zeros({size, count}, at::kLong);
  const at::Tensor own = all.select(0, communicator_->rank());
  for (const GradientSlot& slot : arena_.slots()) {
    const at::Tensor& gradient = slot.parameter.grad();
    const bool is_common =
        closings_->used(slot.index) != 0 && gradient.defined() && !is_sharded(slot);
    own[static_cast<std::int64_t>(slot.index)] =
        is_common ? static_cast<std::int64_t>(digest_of(gradient)) : std::int64_t{0};
  }
  operations_.submit({.kind = OpKind::kAllGather}, own, all, "check of the gradients")->wait();
  for (const GradientSlot& slot : arena_.slots()) {
    for (std::int64_t rank = 1; rank < size; ++rank) {
      const auto index = static_cast<std::int64_t>(slot.index);
      if (all[rank][index].item<std::int64_t>() != all[0][index].item<std::int64_t>()) {
        return std::make_exception_ptr(
            Mismatch(join("the averaged gradient of ", slot.name, " differs between ranks 0 and ",
                          rank, " (PYDIST_DEBUG=1 compares them)")));
      }
    }
  }
  return nullptr;
}

}  // namespace pydist
