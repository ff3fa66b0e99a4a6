// pydist._native.Reducer: what DataParallel is made of.

#include "reducer/reducer.h"

#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/python_comm_hook.h>

#include "bindings/bindings.h"

namespace pydist {
namespace {

// Calls a Python function from the thread that runs backward, which does not hold the GIL.
std::function<void()> adapt_function(py::function function) {
  const std::shared_ptr<py::function> held = hold_function(std::move(function));
  return [held] {
    const py::gil_scoped_acquire gil;
    (*held)();
  };
}

std::shared_ptr<Reducer> create_reducer(
    CommunicatorPtr communicator,
    const std::vector<std::tuple<std::string, at::Tensor, std::optional<at::Tensor>>>& slots,
    const std::vector<std::tuple<std::string, at::Tensor, std::vector<std::size_t>>>& buckets,
    at::Tensor tail, std::optional<at::Tensor> buffer_memory, std::optional<py::function> pack,
    std::optional<py::function> unpack) {
  ReductionPlan plan;
  for (const auto& [name, parameter, view] : slots) {
    GradientSlot& slot = plan.slots.emplace_back();
    slot.index = plan.slots.size() - 1;
    slot.name = name;
    slot.parameter = parameter;
    slot.view = view.value_or(at::Tensor());
  }
  for (const auto& [label, memory, members] : buckets) {
    plan.buckets.push_back({label, memory, members, 0});
  }
  plan.tail = std::move(tail);
  std::optional<BufferExchange> buffers;
  if (buffer_memory) {
    buffers = {*std::move(buffer_memory), adapt_function(pack.value()),
               adapt_function(unpack.value())};
  }
  return Reducer::create(std::move(communicator), std::move(plan), std::move(buffers));
}

}  // namespace

void bind_reducer(py::module_& module) {
  py::class_<ReducerStats>(module, "ReducerStats",
                           "What synchronising gradients has cost since the last reset.")
      .def_readonly("rounds", &ReducerStats::rounds, "Backward passes that were synchronised.")
      .def_readonly("bytes", &ReducerStats::bytes,
                    "Bytes of gradients that were averaged, on this rank.")
      .def_readonly("wait_s", &ReducerStats::wait_s,
                    "Seconds that the training thread spent launching and waiting for "
                    "communication: the part that backward did not hide.");
  py::class_<Reducer, std::shared_ptr<Reducer>>(
      module, "Reducer", "Averages gradients over the ranks while backward still runs.")
      .def(
          py::init(&create_reducer), py::arg("communicator"), py::arg("slots"), py::arg("buckets"),
          py::arg("tail"), py::arg("buffer_memory") = py::none(), py::arg("pack") = py::none(),
          py::arg("unpack") = py::none(),
          "All ranks call, with the same plan. `slots` are (name, parameter, view of the arena; "
          "None for sparse gradients), `buckets` (label, memory, indices of slots) in the order of "
          "launching; `tail` is the end of the last bucket, a word for each slot. At the end of a "
          "round rank 0 calls `pack`, `buffer_memory` is broadcast, and the others call `unpack`.")
      .def("prepare_forward", &Reducer::prepare_forward, py::call_guard<ReleasedGil>(),
           "Waits for what a backward that raised left under way; raises pydist.InvalidUsage where "
           "a parameter has changed its type.")
      .def("watch", &Reducer::watch, py::arg("output"),
           "Announces the backward that will start from an output of forward.")
      .def(
          "register_comm_hook",
          [](Reducer& self, py::object state, py::object hook) {
            self.set_hook(
                std::make_shared<c10d::PythonCommHook>(std::move(state), std::move(hook)));
          },
          py::arg("state"), py::arg("hook"),
          "Lets `hook(state, bucket)` average the buckets: it returns a future of the tensor. "
          "Called "
          "once, before the first backward.")
      .def_property("enabled", &Reducer::is_enabled, &Reducer::set_enabled,
                    "Whether backwards that begin from now on are synchronised.")
      .def_property_readonly("stats", [](const Reducer& self) { return self.stats(); })
      .def("reset_stats", &Reducer::reset_stats, "Starts counting from zero.");
}

}  // namespace pydist
