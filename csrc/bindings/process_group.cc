// pydist._native.ProcessGroup: a communicator as a torch.distributed backend.

#include "c10d/process_group.h"

#include <pybind11/chrono.h>

#include "bindings/bindings.h"

namespace pydist {
namespace {

NoGilPtr<TorchProcessGroup> create(CommunicatorPtr communicator,
                                   std::chrono::milliseconds timeout) {
  if (communicator == nullptr) {
    throw InvalidUsage("A process group needs a communicator, got None.");
  }
  if (timeout <= std::chrono::milliseconds::zero()) {
    throw InvalidUsage(join("A timeout must be positive, got ", timeout.count(), " ms."));
  }
  return NoGilPtr<TorchProcessGroup>(
      c10::make_intrusive<TorchProcessGroup>(std::move(communicator), timeout));
}

void monitored_barrier(TorchProcessGroup& self, std::optional<double> timeout,
                       bool wait_all_ranks) {
  c10d::BarrierOptions options;
  if (timeout) {
    options.timeout = milliseconds_in(*timeout);
  }
  const ReleasedGil released;
  self.monitoredBarrier(options, wait_all_ranks);
}

}  // namespace

void bind_process_group(py::module_& module) {
  py::class_<ProcessGroupOptions, c10d::Backend::Options, c10::intrusive_ptr<ProcessGroupOptions>>(
      module, "ProcessGroupOptions", "What torch asks of a process group that it splits.")
      .def(
          "__deepcopy__",
          [](const ProcessGroupOptions& self, const py::dict& /*memo*/) {
            return c10::make_intrusive<ProcessGroupOptions>(self);
          },
          py::arg("memo"));
  py::class_<TorchProcessGroup, c10d::Backend, NoGilPtr<TorchProcessGroup>>(
      module, "ProcessGroup", "A communicator as the torch.distributed backend 'pydist'.")
      .def(py::init(&create), py::arg("communicator"), py::arg("timeout"),
           "`timeout` (a timedelta, or seconds as a float) becomes the communicator's.")
      .def_property_readonly("communicator", &TorchProcessGroup::communicator)
      .def_property_readonly("options", &TorchProcessGroup::options)
      .def(
          "perform_nocolor_split", [](const TorchProcessGroup&, const py::object& /*device*/) {},
          py::arg("device"),
          "Nothing: what torch calls, where a group has a device, on ranks that a new group leaves "
          "out. NCCL needs them to split its communicators, and pydist makes new ones.")
      .def(
          "monitored_barrier", &monitored_barrier, py::arg("timeout") = py::none(),
          py::arg("wait_all_ranks") = false,
          "A barrier that raises pydist.Timeout after `timeout` seconds, which on rank 0 names the "
          "first rank that did not come, or all of them.");
}

}  // namespace pydist
