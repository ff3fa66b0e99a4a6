// The Python module _fake_cuda: see tests/python/fake_cuda.py.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "fake_cuda.h"
#include "hooks.h"
#include "memory.h"
#include "streams.h"

namespace py = pybind11;

namespace {

// Makes a stream of the pool the calling thread's current one.
class OnStream {
 public:
  explicit OnStream(int device)
      : stream_(fake_cuda::next_stream_of_pool(static_cast<c10::DeviceIndex>(device), false)) {}

  void enter() { before_ = fake_cuda::exchange_stream(stream_); }
  void exit() { (void)fake_cuda::exchange_stream(before_.value()); }
  void synchronize() const {
    fake_cuda::note_host_wait("a stream");
    fake_cuda::Queue::of(stream_).drain();
  }
  // What cudaStream_t would be.
  [[nodiscard]] std::uintptr_t handle() const {
    return reinterpret_cast<std::uintptr_t>(&fake_cuda::Queue::of(stream_));
  }

 private:
  c10::Stream stream_;
  std::optional<c10::Stream> before_;
};

// Holds the calling thread's current stream up until it is released.
class Stall {
 public:
  explicit Stall(int device) {
    fake_cuda::Queue::of(fake_cuda::current_stream(static_cast<c10::DeviceIndex>(device)))
        .post([until = until_] { until->wait(); });
  }
  void release() { until_->pass(); }

 private:
  const std::shared_ptr<fake_cuda::Recording> until_ = std::make_shared<fake_cuda::Recording>();
};

}  // namespace

PYBIND11_MODULE(_fake_cuda, module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  module.def(
      "install",
      [](int devices) {
        fake_cuda::install_guard(devices);
        static std::once_flag once;
        std::call_once(once, [] {
          fake_cuda::install_allocators();
          fake_cuda::install_hooks();
        });
      },
      py::arg("devices"));
  module.def("set_delay_us", &fake_cuda::set_delay_us, py::arg("longest"));
  module.def("take_host_waits", &fake_cuda::take_host_waits);
  module.def("take_event_waits", &fake_cuda::take_event_waits);
  module.def("synchronize", &fake_cuda::synchronize, Released());
  module.def("pinned_bytes", &fake_cuda::pinned_bytes);
  module.def("registered_bytes", &fake_cuda::registered_bytes);
  module.def("registering_devices", &fake_cuda::registering_devices);
  module.def("keep_in_cache", &fake_cuda::keep_in_cache, py::arg("bytes"));
  module.def("refuse_to_register", &fake_cuda::refuse_to_register, py::arg("refuses"));
  module.def("refuse_to_pin", &fake_cuda::refuse_to_pin, py::arg("refuses"));
  module.def("last_error", &cudaGetLastError);
  module.def("current_device", [] { return int{fake_cuda::current_device()}; });
  module.def("set_device",
             [](int device) { fake_cuda::set_device(static_cast<c10::DeviceIndex>(device)); });
  module.def("contexts", &fake_cuda::contexts);
  py::class_<Stall>(module, "Stall")
      .def(py::init<int>(), py::arg("device") = 0)
      .def("release", &Stall::release);
  py::class_<OnStream>(module, "Stream")
      .def(py::init<int>(), py::arg("device") = 0)
      .def(
          "__enter__",
          [](OnStream& self) -> OnStream& {
            self.enter();
            return self;
          },
          py::return_value_policy::reference_internal)
      .def("__exit__", [](OnStream& self, const py::args& /*error*/) { self.exit(); })
      .def("synchronize", &OnStream::synchronize, Released())
      .def_property_readonly("handle", &OnStream::handle);
}
