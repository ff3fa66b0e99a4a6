// pydist._native.Work: an operation under way.

#include "c10d/work.h"

#include "bindings/bindings.h"
#include "c10d/elastic_threads.h"

namespace pydist {
namespace {

struct PythonWork {
  WorkPtr work;
  int rank;
  std::vector<at::Tensor> results;
};

void wait(const PythonWork& self, std::optional<double> timeout) {
  const std::optional<Deadline> deadline = deadline_in(timeout);
  if (self.results.empty() && self.work->is_completed()) {
    self.work->wait();  // only throws its error
    return;
  }
  const ReleasedGil released;
  if (deadline) {
    self.work->wait(*deadline);
  } else {
    wait_for_results(*self.work, self.results);
  }
}

// torch's bindings know how to show a future to Python; no small header does.
py::object get_future(const PythonWork& self) {
  c10::intrusive_ptr<c10d::Work> work = c10::make_intrusive<TorchWork>(
      self.rank, c10d::OpType::UNKNOWN, self.work, self.results, /*sequence=*/0);
  return py::cast(std::move(work)).attr("get_future")();
}

}  // namespace

py::object python_work(WorkPtr work, int rank, std::vector<at::Tensor> results) {
  return py::cast(PythonWork{std::move(work), rank, std::move(results)});
}

void bind_work(py::module_& module) {
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    const ReleasedGil released;
    ElasticThreads::shared().close(std::chrono::seconds(1));
  }));
  py::class_<PythonWork>(module, "Work", "An operation under way.")
      .def("wait", &wait, py::arg("timeout") = py::none(),
           "Returns once the operation has finished; raises its error. Raises pydist.Timeout when "
           "`timeout` seconds pass first: the operation goes on, and may be waited for again. "
           "Without "
           "a timeout, and where the results are on a GPU and the backend is NCCL, the current "
           "stream "
           "waits instead.")
      .def(
          "is_completed", [](const PythonWork& self) { return is_over(*self.work); },
          py::call_guard<ReleasedGil>(),
          "Whether the operation has finished, with or without an error.")
      .def(
          "exception",
          [](const PythonWork& self) -> std::optional<py::object> {
            return python_exception(self.work->exception());
          },
          "The operation's error; None while it runs and when it succeeded.")
      .def_property_readonly(
          "source_rank", [](const PythonWork& self) { return self.work->source_rank(); },
          "Of a receive: the rank that the message came from, once completed; otherwise -1.")
      .def("get_future", &get_future,
           "A torch.futures.Future of the list of output tensors, for `.then()`.");
}

}  // namespace pydist
