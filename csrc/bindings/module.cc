// The Python module pydist._native: C++ concepts one to one, made comfortable by the package.

#include "bindings/bindings.h"

PYBIND11_MODULE(_native, module) {
  module.doc() = "The compiled part of pydist.";
  // The base classes of ours are registered there.
  py::module_::import("torch.distributed");
  pydist::bind_errors(module);
  pydist::bind_info(module);
  pydist::bind_diagnosis(module);
  pydist::bind_interruption();
  pydist::bind_work(module);
  pydist::bind_meeting(module);
  pydist::bind_communicator(module);
  pydist::bind_one_copy(module);
  pydist::bind_placement(module);
  pydist::bind_process_group(module);
  pydist::bind_reducer(module);
  pydist::bind_roofline(module);
  pydist::bind_sampling(module);
  pydist::bind_shared_allocations(module);
  pydist::bind_optimizer_step(module);
  pydist::bind_tuning(module);
  pydist::bind_waiting_at_exit(module);
}
