// pydist._native.KeyedPermutation and multiset_digest: the order of samples, and its audit.

#include <ATen/ops/empty.h>

#include "sampling/keyed_permutation.h"
#include "sampling/multiset_digest.h"

#include "bindings/bindings.h"

namespace pydist {
namespace {

at::Tensor fill(const KeyedPermutation& permutation, std::uint64_t first, std::uint64_t step,
                std::uint64_t count) {
  const ReleasedGil released;
  if (count > permutation.length()) {
    throw InvalidUsage(
        join("A permutation of ", permutation.length(), " elements has no ", count, " places."));
  }
  at::Tensor out = at::empty({static_cast<std::int64_t>(count)}, at::kLong);
  permutation.fill(first, step, {out.mutable_data_ptr<std::int64_t>(), count});
  return out;
}

std::pair<std::uint64_t, std::uint64_t> digest_of(const at::Tensor& indices) {
  if (indices.scalar_type() != at::kLong || !indices.is_cpu()) {
    throw InvalidUsage(join("A digest is of indices in a torch.int64 tensor on the CPU; these are ",
                            indices.scalar_type(), " on ", indices.device(), "."));
  }
  const ReleasedGil released;
  const at::Tensor dense = indices.contiguous();
  MultisetDigest digest;
  digest.add({dense.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(dense.numel())});
  return {digest.high, digest.low};
}

}  // namespace

void bind_sampling(py::module_& module) {
  py::class_<KeyedPermutation>(module, "KeyedPermutation",
                               "A shuffled order that is computed place by place.")
      .def(py::init<std::uint64_t, std::uint64_t, std::uint64_t>(), py::arg("length"),
           py::arg("seed"), py::arg("epoch"))
      .def("fill", &fill, py::arg("first"), py::arg("step"), py::arg("count"),
           "What stands at first, first + step, ...: int64, `count` of them.");
  module.def("multiset_digest", &digest_of, py::arg("indices"),
             "The upper and the lower 64 bits of the digest of a multiset of int64 indices.");
}

}  // namespace pydist
