// pydist._native.Communicator: the seam in Python, a method for each kind of operation.
//
// The file is long because it is one class in Python.

#include "communicator/communicator.h"

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "base/engine_thread.h"
#include "base/log.h"
#include "bindings/arguments.h"
#include "bindings/bindings.h"
#include "c10d/device_streams.h"
#include "c10d/gloo/gloo_communicator.h"
#include "c10d/memory_tensor.h"
#include "c10d/staged/staged_communicator.h"
#include "c10d/store.h"
#include "c10d/work.h"
#include "communicator/departure.h"
#include "communicator/native/native_communicator.h"
#include "communicator/nccl/nccl_communicator.h"
#include "communicator/open_communicators.h"
#include "communicator/peers/endpoint.h"
#include "communicator/peers/own_introduction.h"
#include "cuda/device_memory.h"
#include "health/known_processes.h"

namespace pydist {
namespace {

using Tensors = std::vector<at::Tensor>;
using Timeout_s = std::optional<double>;

struct Options {
  bool async_op;
  std::string_view label;
  Timeout_s timeout;
};

// Starts what `fill` writes into the operation, without the GIL. Returns a Work where asynchronous,
// the source rank of a receive, otherwise None.
template <typename Fill>
py::object launch(Communicator& communicator, OpKind kind, const Options& options, Tensors results,
                  const Fill& fill) {
  const std::optional<Deadline> deadline = deadline_in(options.timeout);
  WorkPtr work;
  int source = -1;
  {
    const ReleasedGil released;
    DenseTensors tensors(communicator, options.async_op ? DenseTensors::Lifetime::kHeld
                                                        : DenseTensors::Lifetime::kBorrowed);
    Operation operation;
    operation.kind = kind;
    operation.deadline = deadline;
    operation.label = options.label;
    fill(operation, tensors);
    tensors.attach_to(operation);
    if (options.async_op) {
      work = communicator.submit(std::move(operation));
      // Where a short message is over already, nothing is to be held or written back.
      if (tensors.is_on_device() || tensors.has_unfinished() || !work->is_completed()) {
        work = with_tensors(std::move(work), std::make_shared<DenseTensors>(std::move(tensors)));
      }
    } else {
      source = communicator.run(std::move(operation));
      tensors.finish_outputs();
    }
  }
  if (work != nullptr) {
    return python_work(std::move(work), communicator.rank(), std::move(results));
  }
  return kind == OpKind::kRecv ? py::object(py::int_(source)) : py::object(py::none());
}

Tensors results_of(bool async_op, const Tensors& tensors) { return async_op ? tensors : Tensors(); }

Tensors results_of(bool async_op, const TensorArgument& argument) {
  return async_op ? Tensors{*argument.tensor} : Tensors();
}

void set_op(Operation& operation, ReduceOp op, const at::Tensor& tensor) {
  operation.op = op;
  require_arithmetic(tensor, operation.kind, op);
}

void set_wire_dtype(Operation& operation, std::optional<at::ScalarType> wire_dtype) {
  if (!wire_dtype) {
    return;
  }
  operation.wire_dtype = dtype_of(*wire_dtype);
  if (!operation.wire_dtype) {
    throw InvalidUsage(join("wire_dtype: ", at::toString(*wire_dtype),
                            " is not a type that elements can travel in; capabilities() lists "
                            "those of the backend."));
  }
}

py::object all_reduce(Communicator& self, TensorArgument input, TensorArgument output,
                      OpArgument op, bool async_op, double factor, Timeout_s timeout,
                      std::string_view label, std::optional<at::ScalarType> wire_dtype) {
  return launch(self, OpKind::kAllReduce, {async_op, label, timeout}, results_of(async_op, output),
                [&](Operation& operation, DenseTensors& tensors) {
                  set_op(operation, op.op, *input.tensor);
                  set_wire_dtype(operation, wire_dtype);
                  operation.factor = factor;
                  operation.inputs = {tensors.input(*input.tensor)};
                  operation.outputs = {tensors.output(*output.tensor)};
                });
}

// What most calls are: looking at arguments that nobody gave costs as much as a small operation.
py::object all_reduce_plainly(Communicator& self, TensorArgument input, TensorArgument output,
                              OpArgument op, bool async_op) {
  return all_reduce(self, input, output, op, async_op, 1.0, std::nullopt, {}, std::nullopt);
}

py::object reduce_scatter(Communicator& self, const TensorsArgument& inputs, TensorArgument output,
                          OpArgument op, bool async_op, double factor, Timeout_s timeout,
                          std::string_view label) {
  return launch(self, OpKind::kReduceScatter, {async_op, label, timeout},
                results_of(async_op, output), [&](Operation& operation, DenseTensors& tensors) {
                  set_op(operation, op.op, *output.tensor);
                  operation.factor = factor;
                  operation.inputs = tensors.inputs(inputs.tensors);
                  operation.outputs = {tensors.output(*output.tensor)};
                });
}

py::object all_gather(Communicator& self, TensorArgument input, const TensorsArgument& outputs,
                      bool async_op, Timeout_s timeout, std::string_view label) {
  return launch(self, OpKind::kAllGather, {async_op, label, timeout},
                results_of(async_op, outputs.tensors),
                [&](Operation& operation, DenseTensors& tensors) {
                  operation.inputs = {tensors.input(*input.tensor)};
                  operation.outputs = tensors.outputs(outputs.tensors);
                });
}

py::object broadcast(Communicator& self, TensorArgument tensor, int root, bool async_op,
                     Timeout_s timeout, std::string_view label) {
  return launch(self, OpKind::kBroadcast, {async_op, label, timeout}, results_of(async_op, tensor),
                [&](Operation& operation, DenseTensors& tensors) {
                  operation.peer = root;
                  if (root == self.rank()) {
                    operation.inputs = {tensors.input(*tensor.tensor)};
                  } else {
                    operation.outputs = {tensors.output(*tensor.tensor)};
                  }
                });
}

py::object reduce(Communicator& self, TensorArgument input, std::optional<TensorArgument> output,
                  int root, OpArgument op, bool async_op, double factor, Timeout_s timeout,
                  std::string_view label) {
  return launch(self, OpKind::kReduce, {async_op, label, timeout},
                output ? results_of(async_op, *output) : Tensors(),
                [&](Operation& operation, DenseTensors& tensors) {
                  operation.peer = root;
                  set_op(operation, op.op, *input.tensor);
                  operation.factor = factor;
                  operation.inputs = {tensors.input(*input.tensor)};
                  if (output && root == self.rank()) {
                    operation.outputs = {tensors.output(*output->tensor)};
                  }
                });
}

py::object gather(Communicator& self, TensorArgument input,
                  const std::optional<TensorsArgument>& outputs, int root, bool async_op,
                  Timeout_s timeout, std::string_view label) {
  return launch(self, OpKind::kGather, {async_op, label, timeout},
                outputs ? results_of(async_op, outputs->tensors) : Tensors(),
                [&](Operation& operation, DenseTensors& tensors) {
                  operation.peer = root;
                  operation.inputs = {tensors.input(*input.tensor)};
                  if (outputs && root == self.rank()) {
                    operation.outputs = tensors.outputs(outputs->tensors);
                  }
                });
}

py::object scatter(Communicator& self, const std::optional<TensorsArgument>& inputs,
                   TensorArgument output, int root, bool async_op, Timeout_s timeout,
                   std::string_view label) {
  return launch(self, OpKind::kScatter, {async_op, label, timeout}, results_of(async_op, output),
                [&](Operation& operation, DenseTensors& tensors) {
                  operation.peer = root;
                  if (inputs && root == self.rank()) {
                    operation.inputs = tensors.inputs(inputs->tensors);
                  }
                  operation.outputs = {tensors.output(*output.tensor)};
                });
}

py::object all_to_all(Communicator& self, const TensorsArgument& inputs,
                      const TensorsArgument& outputs, bool async_op, Timeout_s timeout,
                      std::string_view label) {
  return launch(self, OpKind::kAllToAll, {async_op, label, timeout},
                results_of(async_op, outputs.tensors),
                [&](Operation& operation, DenseTensors& tensors) {
                  operation.inputs = tensors.inputs(inputs.tensors);
                  operation.outputs = tensors.outputs(outputs.tensors);
                });
}

py::object send(Communicator& self, TensorArgument tensor, int dst, TagArgument tag, bool async_op,
                Timeout_s timeout, std::string_view label) {
  return launch(self, OpKind::kSend, {async_op, label, timeout}, {},
                [&](Operation& operation, DenseTensors& tensors) {
                  operation.peer = dst;
                  operation.tag = tag.tag;
                  operation.inputs = {tensors.input(*tensor.tensor)};
                });
}

py::object recv(Communicator& self, TensorArgument tensor, int src, TagArgument tag, bool async_op,
                Timeout_s timeout, std::string_view label) {
  return launch(self, OpKind::kRecv, {async_op, label, timeout}, results_of(async_op, tensor),
                [&](Operation& operation, DenseTensors& tensors) {
                  operation.peer = src;
                  operation.tag = tag.tag;
                  operation.outputs = {tensors.output(*tensor.tensor)};
                });
}

py::object barrier(Communicator& self, bool async_op, Timeout_s timeout, std::string_view label) {
  return launch(self, OpKind::kBarrier, {async_op, label, timeout}, {},
                [](Operation& /*operation*/, DenseTensors& /*tensors*/) {});
}

at::Tensor symmetric_empty(Communicator& self, const std::vector<std::int64_t>& shape,
                           at::ScalarType dtype, at::Device device) {
  std::size_t bytes = at::elementSize(dtype);
  for (const std::int64_t extent : shape) {
    if (extent < 0 || __builtin_mul_overflow(bytes, static_cast<std::size_t>(extent), &bytes)) {
      throw InvalidUsage(
          join("symmetric_empty: a shape with the extent ", extent, " is not valid."));
    }
  }
  const ReleasedGil released;
  const Device place = device_of(device);
  if (!self.takes(place.type)) {
    throw InvalidUsage(join("symmetric_empty: this group has no memory on ", device.str(), "."));
  }
  return tensor_over(self.allocate(bytes, place), shape, dtype, place);
}

bool is_device_capturing(at::Device device) {
  return !device.is_cpu() && is_capturing(current_stream(device_of(device)));
}

py::dict capabilities(const Communicator& self) {
  const Capabilities capabilities = self.capabilities();
  py::list devices;
  for (const Device& device : capabilities.devices) {
    devices.append(device.type == DeviceType::kCpu ? "cpu" : "cuda");
  }
  py::list wire_dtypes;
  for (const DType dtype : capabilities.wire_dtypes) {
    wire_dtypes.append(py::str(std::string(to_string(dtype))));
  }
  py::dict result;
  result["backend"] = capabilities.backend;
  result["devices"] = devices;
  result["device_bytes"] = capabilities.device_bytes;
  result["spans_hosts"] = capabilities.spans_hosts;
  result["symmetric_memory"] = capabilities.symmetric_memory;
  result["any_source"] = capabilities.any_source;
  result["ragged"] = capabilities.ragged;
  result["wire_dtypes"] = wire_dtypes;
  result["equal_on_all_ranks"] = capabilities.equal_on_all_ranks;
  result["equal_from_run_to_run"] = capabilities.equal_from_run_to_run;
  result["equal_for_all_chunkings"] = capabilities.equal_for_all_chunkings;
  result["numerics"] = capabilities.numerics;
  return result;
}

std::string why_unsupported(const Communicator& self, KindArgument kind, OpArgument op,
                            at::ScalarType dtype) {
  return self.why_unsupported(kind.kind, op.op, dtype_of(dtype).value_or(DType::kFloat8));
}

std::optional<py::object> failure(const Communicator& self) {
  return python_exception(self.failure());
}

void show_awaited(const std::string& group, int rank, const std::string& host, int pid) {
  if (const std::shared_ptr<Endpoint> endpoint = Endpoint::of_process_if_any()) {
    endpoint->show_awaited(group, rank, host, pid);
  }
}

void show_awaiting_nobody() {
  if (const std::shared_ptr<Endpoint> endpoint = Endpoint::of_process_if_any()) {
    endpoint->show_awaiting_nobody();
  }
}

py::object error_of_lateness(const ProcessTuples& processes, const std::string& name,
                             const std::vector<int>& missing,
                             const std::optional<CommunicatorPtr>& parent) {
  const ErrorDescription why = lateness(known_processes(processes), name, missing);
  const Timeout late(why.message, why.blame);
  return python_exception(std::make_exception_ptr(parent ? (*parent)->with_keeper(late) : late));
}

// For those that wait for these processes to make a group. `parent`, where there is one, knows of
// them, too.
CheckHope hope_of(const KnownProcesses& processes, const std::optional<CommunicatorPtr>& parent) {
  CheckHope live = hope_that_live(processes);
  if (!parent) {
    return live;
  }
  std::vector<int> ranks;
  for (const KnownProcess& each : processes) {
    ranks.push_back(each.rank);
  }
  // The new group may keep it, and live longer.
  return [live = std::move(live), ranks = std::move(ranks), parent = std::weak_ptr(*parent)] {
    if (live) {
      live();
    }
    if (const CommunicatorPtr group = parent.lock()) {
      group->require_hope(ranks);
    }
  };
}

CommunicatorPtr create_native(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                              std::string name, std::optional<double> timeout_s,
                              const ProcessTuples& processes,
                              const std::optional<CommunicatorPtr>& parent,
                              std::optional<std::string> address,
                              std::optional<std::shared_ptr<OwnIntroduction>> introduction,
                              const std::optional<py::bytes>& roster) {
  Introduced introduced{.own = introduction.value_or(nullptr)};
  if (roster) {
    introduced.roster = std::string(*roster);
  }
  const ReleasedGil released;
  NativeOptions options;
  options.name = std::move(name);
  options.address = std::move(address);
  options.processes = known_processes(processes);
  options.check_hope = hope_of(options.processes, parent);
  if (timeout_s) {
    options.environment.timeout = milliseconds_in(*timeout_s);
  }
  const std::chrono::milliseconds patience =
      std::min<std::chrono::milliseconds>(kStorePatience, options.environment.timeout);
  try {
    return for_python(
        with_staging(create_native_communicator(adapt_store(std::move(store), patience, size), rank,
                                                size, options, std::move(introduced))));
  } catch (const Timeout& late) {
    if (!parent) {
      throw;
    }
    throw(*parent)->with_keeper(late);
  }
}

// Wraps the Python factory as a C++ function that takes the GIL and converts Python's exceptions to
// the engine's errors.
GlooFactory adapt_factory(py::function factory) {
  const std::shared_ptr<py::function> held = hold_function(std::move(factory));
  return [held](c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                std::chrono::milliseconds timeout) {
    const py::gil_scoped_acquire gil;
    try {
      return (*held)(std::move(store), rank, size, timeout)
          .cast<c10::intrusive_ptr<c10d::Backend>>();
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) {
        throw;  // Ctrl-C
      }
      const std::string what = error.what();
      const std::string line = what.substr(0, what.find('\n'));
      // The bare word of the system for EAGAIN, which gloo's threads come to.
      const bool lacks_thread = line.ends_with("Error: Resource temporarily unavailable");
      const bool is_late =
          what.find("imed out") != std::string::npos || what.find("imeout") != std::string::npos;
      std::rethrow_exception(
          make_error(kind_of(error, is_late ? ErrorKind::kTimeout : ErrorKind::kTransport),
                     join("gloo could not connect rank ", rank, " with the other ", size - 1, ": ",
                          line, lacks_thread ? join(". ", kNoThread) : "")));
    } catch (const py::cast_error&) {
      throw InvalidUsage("The factory of gloo backends must return a torch.distributed backend.");
    }
  };
}

CommunicatorPtr create_gloo(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                            std::string name, double timeout, py::function factory,
                            const ProcessTuples& processes, double long_wait,
                            const std::optional<CommunicatorPtr>& parent,
                            std::vector<std::string> interfaces,
                            std::optional<std::string> address) {
  const std::chrono::milliseconds limit = milliseconds_in(timeout);
  const std::chrono::milliseconds long_limit = milliseconds_in(long_wait);
  GlooFactory adapted = adapt_factory(std::move(factory));
  const ReleasedGil released;
  KnownProcesses known = known_processes(processes);
  CheckHope hope = hope_of(known, parent);
  return for_python(with_staging(create_gloo_communicator(
      std::move(store), rank, size, std::move(name), limit, std::move(adapted), std::move(hope),
      long_limit, std::move(known), {std::move(interfaces), std::move(address)})));
}

CommunicatorPtr create_nccl(CommunicatorPtr host, int device, const std::string& library) {
  const ReleasedGil released;
  cuda::set_framework(torch_as_framework());
  NcclOptions options;
  try {
    options.api = nccl::Api::open(library);
    prepare_copies({DeviceType::kCuda, device});
  } catch (const TransportError& error) {
    options.why_no_api = error.what();
  }
  options.host = std::move(host);
  options.device = device;
  return for_python(create_nccl_communicator(std::move(options)));
}

void release_process() {
  let_go_of_nccl();
  Endpoint::release_process();
}

// Looking for what is given by name costs about as much as a small operation. So what pydist's own
// functions give comes first, in one order.
void bind_operations(py::class_<Communicator, CommunicatorPtr>& type) {
  const auto op = py::arg_v("op", py::str("sum"), "'sum'");
  const auto async_op = py::arg("async_op") = false;
  const auto factor = py::arg("factor") = 1.0;
  const auto label = py::arg("label") = "";
  const auto timeout = py::arg("timeout") = py::none();
  type.def("all_reduce", &all_reduce_plainly, py::arg("input"), py::arg("output"), py::arg("op"),
           py::arg("async_op"), "The plain case of the following.");
  type.def("all_reduce", &all_reduce, py::arg("input"), py::arg("output"), op, async_op, factor,
           timeout, label, py::arg("wire_dtype") = py::none(),
           "output = the elements of all ranks' inputs combined; they may be one tensor. Returns a "
           "Work where async_op, otherwise None. Sums, means and premul_sums of float32 travel as "
           "wire_dtype where it is given: torch.float16 or torch.bfloat16, alike on all ranks.");
  type.def("reduce_scatter", &reduce_scatter, py::arg("inputs"), py::arg("output"), op, async_op,
           factor, timeout, label, "output = this rank's block of the combined inputs.");
  type.def("all_gather", &all_gather, py::arg("input"), py::arg("outputs"), async_op, timeout,
           label, "outputs = the inputs of all ranks, in rank order.");
  type.def("broadcast", &broadcast, py::arg("tensor"), py::arg("root"), async_op, timeout, label,
           "tensor = the root's tensor.");
  type.def("reduce", &reduce, py::arg("input"), py::arg("output"), py::arg("root"), op, async_op,
           factor, timeout, label,
           "At the root: output = the combined inputs. Elsewhere output is ignored.");
  type.def("gather", &gather, py::arg("input"), py::arg("outputs"), py::arg("root"), async_op,
           timeout, label, "At the root: outputs = the inputs of all ranks, in rank order.");
  type.def("scatter", &scatter, py::arg("inputs"), py::arg("output"), py::arg("root"), async_op,
           timeout, label, "output = this rank's block of the root's inputs.");
  type.def("all_to_all", &all_to_all, py::arg("inputs"), py::arg("outputs"), async_op, timeout,
           label, "Block i of the inputs goes to rank i, into its block of this rank.");
  type.def("send", &send, py::arg("tensor"), py::arg("dst"), py::arg_v("tag", py::int_(0), "0"),
           async_op, timeout, label, "Sends to rank dst, which receives it with the same tag.");
  type.def("recv", &recv, py::arg("tensor"), py::arg("src") = kAnySource,
           py::arg_v("tag", py::int_(0), "0"), async_op, timeout, label,
           "Receives from rank src, or from anybody (-1). Returns the source rank, or a Work.");
  type.def("barrier", &barrier, async_op, timeout, label,
           "Returns once every rank of the group has called.");
}

}  // namespace

void bind_communicator(py::module_& module) {
  py::class_<Communicator, CommunicatorPtr> type(
      module, "Communicator",
      "One group of ranks on one backend. Collectives are called by every rank of the group, in "
      "the same order; any dense tensor on a device of capabilities() will do, also a "
      "non-contiguous one.");
  type.def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("name", &Communicator::name)
      .def_property_readonly("backend",
                             [](const Communicator& self) { return self.capabilities().backend; })
      .def_property(
          "timeout",
          [](const Communicator& self) {
            return std::chrono::duration<double>(self.timeout()).count();
          },
          [](Communicator& self, double seconds) { self.set_timeout(milliseconds_in(seconds)); },
          "Seconds that an operation without a timeout of its own may take.")
      .def_property_readonly("failure", &failure,
                             "The error that the group has failed with; None while it is sound.");
  bind_operations(type);
  type.def("symmetric_empty", &symmetric_empty, py::arg("shape"), py::arg("dtype"),
           py::arg_v("device", at::Device(at::kCPU), "torch.device('cpu')"),
           "A tensor over memory that the backend allocates; all ranks call, with equal sizes.")
      .def(
          "split",
          [](Communicator& self, const std::vector<int>& ranks, bool on_host) {
            return for_python(on_host ? self.split_on_host(ranks) : self.split(ranks));
          },
          py::arg("ranks"), py::arg("on_host") = false, py::call_guard<ReleasedGil>(),
          "A group of the given ranks of this one, in that order; only they call. `on_host`: for "
          "CPU tensors alone.")
      .def(
          "abort",
          [](Communicator& self, const std::string& message) { self.abort(Aborted(message)); },
          py::arg("message"), py::call_guard<ReleasedGil>(),
          "Fails the group, here and on every other rank.")
      .def("check_shutdown", &Communicator::check_shutdown, py::call_guard<ReleasedGil>(),
           "Raises InvalidUsage where shutdown() would break a capture that is under way.")
      .def(
          "shutdown",
          [](Communicator& self) {
            self.check_shutdown();
            self.shutdown();
          },
          py::call_guard<ReleasedGil>(),
          "Lets the group go. Idempotent; raises what check_shutdown() does.")
      .def("whereabouts", &Communicator::whereabouts, py::call_guard<ReleasedGil>(),
           "What every rank of the group is in, a line each; empty where the backend cannot tell.")
      .def(
          "place_of",
          [](const Communicator& self,
             int rank) -> std::pair<std::optional<std::string>, std::optional<int>> {
            const Blame known = [&] {
              const ReleasedGil released;
              return self.culprit(rank, {});
            }();
            if (known.pid == 0) {
              return {};
            }
            return {known.host, known.pid};
          },
          py::arg("rank"),
          "The host and the process id of a rank of the group; None for both where the backend "
          "does not know them.")
      .def("require_hope", &Communicator::require_hope, py::arg("ranks"),
           py::call_guard<ReleasedGil>(),
           "Raises where one of these ranks will not come to make a group, or where this group was "
           "aborted.")
      .def("capabilities", &capabilities, "What the backend can do and what it guarantees.")
      .def("why_unsupported", &why_unsupported, py::arg("kind"), py::arg("op"), py::arg("dtype"),
           "An empty text where the backend can run the operation; otherwise why not.");
  module.def("is_capturing", &is_device_capturing, py::arg("device"),
             "Whether the current stream of a device records a CUDA graph.");
  module.def("create_native", &create_native, py::arg("store"), py::arg("rank"), py::arg("size"),
             py::arg("name"), py::arg("timeout") = py::none(),
             py::arg("processes") = ProcessTuples(), py::arg("parent") = py::none(),
             py::arg("address") = py::none(), py::arg("introduction") = py::none(),
             py::arg("roster") = py::none(),
             "Joins a group on the native backend; all its ranks call. `store` is a torch store; "
             "`timeout` is in seconds, for joining and for each operation, PYDIST_TIMEOUT by "
             "default; `processes` are those of all ranks, where they are known: the number of "
             "the rank in the group that this one is made of, its host, pid, start in ticks, and "
             "whether it runs on this machine. `parent` is that group, which knows who has left. "
             "`address` is the one by which other hosts reach this one, unless PYDIST_INTERFACE "
             "names others; None: any. `introduction` is this rank's, and `roster` what rank 0 has "
             "made of those of all, where the ranks have told each other; otherwise they do so "
             "now.");
  module.def("show_awaited", &show_awaited, py::arg("group"), py::arg("rank"), py::arg("host"),
             py::arg("pid"),
             "Shows the other processes of this host that this one waits for a rank, so that those "
             "who wait for this one find out who keeps all waiting.");
  module.def("show_awaiting_nobody", &show_awaiting_nobody,
             "Takes back what show_awaited() shows.");
  module.def("error_of_lateness", &error_of_lateness, py::arg("processes"), py::arg("group"),
             py::arg("missing"), py::arg("parent") = py::none(),
             "The Timeout of a rank that has waited for others to make a group; `processes` and "
             "`parent` as for create_native, `missing` as they are numbered in the new group.");
  module.def(
      "create_nccl", &create_nccl, py::arg("host"), py::arg("device"), py::arg("library"),
      "Joins the ranks of `host`, a communicator on native or gloo that then belongs to the new "
      "one, on NCCL; all of them call. `device` is the index of this rank's GPU; `library` the "
      "path of libnccl.so.2, for where the process has not loaded one.");
  module.def("abort_all", &abort_all, py::arg("message"), py::arg("cause"),
             py::call_guard<ReleasedGil>(),
             "Fails all groups of this process, here and on every other rank: this rank is the "
             "culprit, `cause` the reason that errors carry.");
  module.def("note_program_end", &note_program_end,
             "The program is at its end: peers read that, where they still wait for this process.");
  // Peers of a script that just ends are to learn of a departure, not of a death.
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    const ReleasedGil released;
    shut_down_all();
    Endpoint::depart_all();
    release_process();
  }));
  module.def(
      "set_rank",
      [](int rank) {
        set_log_rank(rank);
        Endpoint::show_rank(rank);
      },
      py::arg("rank"), py::call_guard<ReleasedGil>(),
      "This process's rank in its job, for its log lines and `pydist doctor`; -1: it is in none.");
  module.def("release_process", &release_process, py::call_guard<ReleasedGil>(),
             "Lets go of what this process keeps between its groups: its threads, segments and "
             "sockets end with the last group. Waits for what is left of groups that have ended.");
  module.def(
      "create_gloo", &create_gloo, py::arg("store"), py::arg("rank"), py::arg("size"),
      py::arg("name"), py::arg("timeout"), py::arg("factory"),
      py::arg("processes") = ProcessTuples(),
      py::arg("long_wait") = std::chrono::duration<double>(kLongWait).count(),
      py::arg("parent") = py::none(), py::arg("interfaces") = std::vector<std::string>(),
      py::arg("address") = py::none(),
      "Joins a group on torch's gloo; all its ranks call. `timeout` is in seconds; "
      "`factory(store, rank, size, timeout)` returns a ProcessGroupGloo, its timeout being a "
      "datetime.timedelta; `processes` and `parent` as for create_native. The log tells of an "
      "operation that lasts for `long_wait` seconds. `interfaces`, or `address` where there are "
      "none: by which the other ranks reach this one, beside gloo's own connections.");
}

}  // namespace pydist
