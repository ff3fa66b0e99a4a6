// Ctrl-C and Python's signal handlers, for threads that wait in the engine.

#include "base/interruption.h"

#include "bindings/bindings.h"

namespace pydist {
namespace {

// Signal handlers run on Python's main thread only.
unsigned long main_thread = 0;

void run_signal_handlers() {
  if (PyThread_get_thread_ident() != main_thread || Py_IsInitialized() == 0) {
    return;
  }
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
}

}  // namespace

void bind_interruption() {
  main_thread =
      py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  set_interruption_check(&run_signal_handlers);
}

}  // namespace pydist
