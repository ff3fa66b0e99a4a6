// What the files of this folder share: one function for each concept, which adds it to the module,
// and the rules of the GIL.
//
// The GIL is held while Python objects are looked at, and released while tensors are copied, while
// the engine works and while communicators and process groups are destroyed. Nothing here takes it
// on a thread of the engine's.

#pragma once

#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "c10d/tensors.h"
#include "communicator/communicator.h"

namespace pydist {

void bind_diagnosis(py::module_& module);
void bind_errors(py::module_& module);
void bind_info(py::module_& module);
void bind_interruption();
void bind_work(py::module_& module);
void bind_communicator(py::module_& module);
void bind_meeting(py::module_& module);
void bind_one_copy(py::module_& module);
void bind_placement(py::module_& module);
void bind_process_group(py::module_& module);
void bind_reducer(py::module_& module);
void bind_roofline(py::module_& module);
void bind_sampling(py::module_& module);
void bind_shared_allocations(py::module_& module);
void bind_optimizer_step(py::module_& module);
void bind_tuning(py::module_& module);
void bind_waiting_at_exit(py::module_& module);

// The Python exception for any C++ exception; None for null. Needs the GIL.
[[nodiscard]] py::object python_exception(const std::exception_ptr& error);

// The kind of a pydist error that was raised in Python; `otherwise` for any other error.
[[nodiscard]] ErrorKind kind_of(const py::error_already_set& error, ErrorKind otherwise);

// The Python object for an operation under way. Needs the GIL.
[[nodiscard]] py::object python_work(WorkPtr work, int rank, std::vector<at::Tensor> results);

// Releases the GIL, cheaper than pybind11's guard; only where the thread certainly holds it.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;
  ~ReleasedGil() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// Runs `function` without the GIL, whether or not the thread holds it.
template <typename Function>
void without_gil(Function&& function) {
  if (Py_IsInitialized() != 0 && PyGILState_Check() == 1) {
    const ReleasedGil released;
    std::forward<Function>(function)();
  } else {
    std::forward<Function>(function)();
  }
}

// `communicator` for Python to hold: the last reference is dropped without the GIL, since a
// communicator's destructor waits for threads.
[[nodiscard]] inline CommunicatorPtr for_python(CommunicatorPtr communicator) {
  Communicator* const raw = communicator.get();
  return {raw, [held = std::move(communicator)](Communicator*) mutable {
            without_gil([&] { held.reset(); });
          }};
}

// A Python function for C++ to hold and call under the GIL, on any thread. Released under the GIL,
// or not at all once the interpreter is gone.
[[nodiscard]] inline std::shared_ptr<py::function> hold_function(py::function function) {
  return {new py::function(std::move(function)), [](py::function* held) {
            if (Py_IsInitialized() == 0) {
              return;
            }
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

// Seconds, as Python gives them, of a wait or of an operation; None leaves the default.
[[nodiscard]] inline std::optional<Deadline> deadline_in(std::optional<double> seconds) {
  if (!seconds) {
    return std::nullopt;
  }
  if (!(*seconds > 0)) {
    throw InvalidUsage(join("A timeout must be more than 0 seconds, got ", *seconds, "."));
  }
  // Three years and more are "never" to the engine's clock.
  return *seconds > 1e8
             ? Deadline::never()
             : Deadline::in(std::chrono::nanoseconds(static_cast<std::int64_t>(*seconds * 1e9)));
}

[[nodiscard]] inline std::chrono::milliseconds milliseconds_in(double seconds) {
  if (!(seconds > 0)) {
    throw InvalidUsage(join("A timeout must be more than 0 seconds, got ", seconds, "."));
  }
  return std::chrono::milliseconds(
      std::max<std::int64_t>(1, static_cast<std::int64_t>(std::min(seconds, 1e8) * 1e3)));
}

// Like torch's own holder of backends, which no header ships: a c10::intrusive_ptr whose last
// reference is dropped without the GIL. torch reads it as a plain c10::intrusive_ptr.
template <typename T>
class NoGilPtr {
 public:
  using element_type = T;

  NoGilPtr() = default;
  explicit NoGilPtr(T* raw) : pointer_(c10::intrusive_ptr<T>::unsafe_steal_from_new(raw)) {}
  explicit NoGilPtr(c10::intrusive_ptr<T> pointer) : pointer_(std::move(pointer)) {}
  NoGilPtr(const NoGilPtr&) = default;
  NoGilPtr(NoGilPtr&&) noexcept = default;
  NoGilPtr& operator=(const NoGilPtr&) = default;
  NoGilPtr& operator=(NoGilPtr&&) noexcept = default;
  ~NoGilPtr() {
    if (pointer_) {
      without_gil([this] { pointer_.reset(); });
    }
  }

  T* get() const noexcept { return pointer_.get(); }
  T* operator->() const noexcept { return pointer_.get(); }
  T& operator*() const noexcept { return *pointer_; }
  explicit operator bool() const noexcept { return static_cast<bool>(pointer_); }

 private:
  c10::intrusive_ptr<T> pointer_;
};

}  // namespace pydist

PYBIND11_DECLARE_HOLDER_TYPE(T, pydist::NoGilPtr<T>, true)
