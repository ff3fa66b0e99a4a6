// pydist._native.OneCopy: memory of which all ranks of a group map the same copy.

#include "communicator/one_copy.h"

#include <ATen/ops/from_blob.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/bindings.h"

namespace pydist {
namespace {

// Both tensors are over the memory of `copy`, which lives as long as either of them.
struct PythonOneCopy {
  std::shared_ptr<OneCopy> copy;
  at::Tensor memory;
  at::Tensor view;
};

PythonOneCopy make_one_copy(Communicator& communicator, std::size_t count, at::ScalarType dtype) {
  const ReleasedGil released;
  const auto copy =
      std::make_shared<OneCopy>(allocate_one_copy(communicator, count * at::elementSize(dtype)));
  const auto over = [&](std::byte* data) {
    return at::from_blob(
        data, {static_cast<std::int64_t>(count)}, [copy](void*) {},
        at::TensorOptions().dtype(dtype));
  };
  return {copy, over(copy->segment.data()), over(copy->view.data())};
}

std::vector<std::pair<std::size_t, std::size_t>> written(const PythonOneCopy& self) {
  const ReleasedGil released;
  std::vector<std::pair<std::size_t, std::size_t>> ranges;
  for (const PrivateView::Range& range : self.copy->view.written()) {
    ranges.emplace_back(range.begin, range.end);
  }
  return ranges;
}

}  // namespace

void bind_one_copy(py::module_& module) {
  py::class_<PythonOneCopy>(module, "OneCopy",
                            "Memory of which all ranks of a group, on one host, map the same copy.")
      .def(py::init(&make_one_copy), py::arg("communicator"), py::arg("count"), py::arg("dtype"),
           "`count` zeros of a dtype. All ranks call it.")
      .def_readonly("memory", &PythonOneCopy::memory,
                    "A tensor over the copy: what one rank writes there, all ranks read.")
      .def_readonly("view", &PythonOneCopy::view,
                    "A tensor that shows the copy, but for the pages that this rank has written "
                    "through it: what it writes there, no other rank reads.")
      .def("written", &written,
           "Ranges of bytes, in whole pages, that this rank has written through the view since the "
           "last `forget`; perhaps more than those.")
      .def(
          "forget", [](PythonOneCopy& self) { self.copy->view.forget(); },
          py::call_guard<ReleasedGil>(),
          "Lets the view show the copy everywhere again. Nobody may use the view meanwhile.")
      .def(
          "share", [](PythonOneCopy& self, bool is_shared) { self.copy->view.share(is_shared); },
          py::arg("is_shared"), py::call_guard<ReleasedGil>(),
          "Whether what is written through the view goes into the copy from now on. Forgets what "
          "was written through it. Nobody may use the view meanwhile.");
}

}  // namespace pydist
