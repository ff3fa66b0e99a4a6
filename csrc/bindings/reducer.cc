// pydist._native.Reducer: what DataParallel is made of.

#include "reducer/reducer.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/python_comm_hook.h>

#include "base/env.h"
#include "bindings/bindings.h"
#include "c10d/device_streams.h"

namespace pydist {
namespace {

// Calls a Python function from a thread that does not hold the GIL, such as the one that runs
// backward. What it raises goes on as torch's own exception, which needs no GIL.
template <typename Result, typename... Arguments>
Result call_python(const py::function& function, const Arguments&... arguments) {
  const py::gil_scoped_acquire gil;
  try {
    if constexpr (std::is_void_v<Result>) {
      function(arguments...);
    } else {
      return function(arguments...).template cast<Result>();
    }
  } catch (py::error_already_set& error) {
    error.restore();
    python_error for_torch;
    for_torch.persist();
    throw for_torch;
  }
}

// From here on a thread that asks for the GIL may end in place of getting it.
bool is_python_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Runs what may call Python functions, without the GIL.
template <typename Function>
auto calling_python(Function&& function) -> decltype(std::forward<Function>(function)()) {
  try {
    const ReleasedGil released;
    return std::forward<Function>(function)();
  } catch (python_error& error) {
    error.restore();
    throw py::error_already_set();
  }
}

std::optional<BufferExchange> adapt_buffers(const py::object& buffers) {
  if (buffers.is_none()) {
    return std::nullopt;
  }
  return BufferExchange{
      buffers.attr("memory").cast<at::Tensor>(),
      [held = hold_function(buffers.attr("has_changed"))] { return call_python<bool>(*held); },
      [held = hold_function(buffers.attr("pack"))] { call_python<void>(*held); },
      [held = hold_function(buffers.attr("unpack"))] { call_python<void>(*held); },
      [held = hold_function(buffers.attr("renew"))] { return call_python<at::Tensor>(*held); },
  };
}

std::shared_ptr<Reducer> create_reducer(
    CommunicatorPtr communicator,
    const std::vector<std::tuple<std::string, at::Tensor, bool>>& parameters, py::function planner,
    bool sums, std::optional<at::ScalarType> wire_dtype, bool measures_link,
    bool gradients_are_views, std::size_t least_made_in_place, int rank,
    const py::object& buffers) {
  std::vector<NamedParameter> named_parameters;
  for (const auto& [name, tensor, is_sparse] : parameters) {
    named_parameters.push_back({name, tensor, is_sparse, /*owner=*/0, at::Tensor()});
  }
  Planner plan = [held = hold_function(std::move(planner))](const ArrivalOrder::Expected& expected,
                                                            const std::vector<std::size_t>& blocks,
                                                            LinkSpeed speed) {
    std::vector<std::size_t> order;
    for (const std::size_t slot : expected.order) {
      if (blocks[slot] != kNoBlock) {
        order.push_back(slot);
      }
    }
    const auto end = expected.order.begin() + static_cast<std::ptrdiff_t>(expected.regular);
    const std::vector<std::size_t> regular(expected.order.begin(), end);
    return call_python<BucketPlan>(*held, order, regular, blocks, speed.latency_s,
                                   speed.seconds_per_byte);
  };
  const Environment environment = Environment::read();
  ReducerOptions options;
  options.sums = sums;
  if (wire_dtype) {
    options.wire_dtype = dtype_of(*wire_dtype);
  }
  options.measures_link = measures_link;
  options.gradients_are_views = gradients_are_views;
  options.least_made_in_place = least_made_in_place;
  options.checks_gradients = environment.debug;
  options.timeline = environment.timeline;
  options.timeline_rank = rank;
  options.among_users = [](const std::function<void()>& function) {
    if (Py_IsInitialized() == 0 || is_python_finalizing()) {
      return function();
    }
    const py::gil_scoped_acquire gil;
    function();
  };
  std::optional<BufferExchange> exchange = adapt_buffers(buffers);
  return calling_python([&] {
    return Reducer::create(std::move(communicator), std::move(named_parameters), std::move(plan),
                           std::move(exchange), std::move(options));
  });
}

Reducer::Joining joining_of(const std::string& name) {
  return name == "zeros"    ? Reducer::Joining::kAsZeros
         : name == "absent" ? Reducer::Joining::kNotAtAll
                            : Reducer::Joining::kNot;
}

// (label, bytes, indices of parameters) of each bucket, in the order of launching.
py::list buckets_of(const Reducer& reducer) {
  py::list buckets;
  for (const GradientBucket& bucket : reducer.arena().buckets()) {
    buckets.append(py::make_tuple(bucket.label, bucket.memory.nbytes(), bucket.slots));
  }
  return buckets;
}

py::dict sharded_bucket(const Reducer& reducer, const GradientBucket& bucket) {
  py::list members;
  for (std::size_t member = 0; member < bucket.slots.size(); ++member) {
    const GradientSlot& slot = reducer.arena().slots()[bucket.slots[member]];
    members.append(py::make_tuple(slot.index, bucket.layout.offsets()[member], slot.strides));
  }
  py::dict result;
  result["number"] = bucket.number;
  result["label"] = bucket.label;
  result["members"] = members;
  result["layout"] = bucket.layout;
  result["shard"] = bucket.shard;
  return result;
}

// Those of one optimizer, in the order of launching.
py::list sharded_buckets(const Reducer& reducer, int owner) {
  py::list buckets;
  for (const GradientBucket& bucket : reducer.arena().buckets()) {
    if (bucket.owner == owner) {
      buckets.append(sharded_bucket(reducer, bucket));
    }
  }
  return buckets;
}

void bind_shards(py::module_& module) {
  py::class_<ShardLayout>(module, "ShardLayout",
                          "How a bucket is divided among the ranks that update it.")
      .def(py::init<std::vector<std::size_t>, std::size_t, int>(), py::arg("counts"),
           py::arg("element_bytes"), py::arg("ranks"),
           "For parameters of so many elements each, one behind the other.")
      .def_property_readonly("count", &ShardLayout::count, "Elements, with padding.")
      .def_property_readonly("shard", &ShardLayout::shard, "Elements of each rank's shard.")
      .def_property_readonly("offsets", &ShardLayout::offsets, "Where each parameter begins.")
      .def(
          "segments",
          [](const ShardLayout& self, int rank) {
            py::list segments;
            for (const ShardSegment& segment : self.segments(rank)) {
              segments.append(
                  py::make_tuple(segment.slot, segment.begin, segment.count, segment.offset));
            }
            return segments;
          },
          py::arg("rank"),
          "What a rank's shard has: (which parameter, begin in it, elements, begin in the shard).");
}

void bind_stats(py::module_& module) {
  py::class_<BucketStats>(module, "BucketStats",
                          "One bucket, as means over the rounds since the plan last changed; "
                          "seconds since the beginning of backward.")
      .def_readonly("label", &BucketStats::label, "Its number and first parameter.")
      .def_readonly("bytes", &BucketStats::bytes, "Bytes of gradients.")
      .def_readonly("ready_s", &BucketStats::ready_s, "All of its gradients were there.")
      .def_readonly("launched_s", &BucketStats::launched_s,
                    "It went on its way: ready, and after those before it.")
      .def_readonly("done_s", &BucketStats::done_s, "It was averaged.")
      .def("__repr__", [](const BucketStats& self) {
        return join("BucketStats(label='", self.label, "', bytes=", self.bytes,
                    ", ready_s=", self.ready_s, ", launched_s=", self.launched_s,
                    ", done_s=", self.done_s, ")");
      });
  py::class_<ReducerStats>(module, "ReducerStats",
                           "What synchronising gradients has cost since the last reset.")
      .def_readonly("rounds", &ReducerStats::rounds, "Backward passes that were synchronised.")
      .def_readonly("bytes", &ReducerStats::bytes,
                    "Bytes of gradients that were averaged, on this rank.")
      .def_readonly("copied_bytes", &ReducerStats::copied_bytes,
                    "Bytes that were copied because the program holds gradients of earlier steps, "
                    "or has put its own into `parameter.grad` and holds them. Otherwise 0.")
      .def_readonly("compute_s", &ReducerStats::compute_s,
                    "Seconds in backward, without launching communication.")
      .def_readonly("communication_s", &ReducerStats::communication_s,
                    "Seconds in which at least one bucket was under way.")
      .def_readonly("exposed_s", &ReducerStats::exposed_s,
                    "Seconds that the training thread spent launching and waiting for "
                    "communication: the part that backward did not hide.")
      .def_readonly("buckets", &ReducerStats::buckets, "In the order of launching.")
      .def("__repr__", [](const ReducerStats& self) {
        return join("ReducerStats(rounds=", self.rounds, ", bytes=", self.bytes,
                    ", copied_bytes=", self.copied_bytes, ", compute_s=", self.compute_s,
                    ", communication_s=", self.communication_s, ", exposed_s=", self.exposed_s,
                    ", buckets=<", self.buckets.size(), ">)");
      });
}

}  // namespace

void bind_reducer(py::module_& module) {
  bind_stats(module);
  bind_shards(module);
  py::class_<Reducer, std::shared_ptr<Reducer>>(
      module, "Reducer", "Averages gradients over the ranks while backward still runs.")
      .def(py::init(&create_reducer), py::arg("communicator"), py::arg("parameters"),
           py::arg("planner"), py::arg("sums"), py::arg("wire_dtype"), py::arg("measures_link"),
           py::arg("gradients_are_views"), py::arg("least_made_in_place"), py::arg("rank"),
           py::arg("buffers"),
           "All ranks call, with the same parameters: (name, parameter, whether its gradient is "
           "sparse). `planner(order, regular, blocks, latency_s, seconds_per_byte)` returns the "
           "buckets as lists of indices, on rank 0. Gradients of `least_made_in_place` bytes and "
           "more are "
           "computed where they travel from. `rank` names this process in traces. At the "
           "end of a round in which "
           "`buffers.has_changed()` on any rank, one rank calls `buffers.pack`, `buffers.memory` "
           "is broadcast, and the others call `buffers.unpack`; after "
           "parameters were added all call `buffers.renew`, which returns new memory. `buffers` "
           "may be None.")
      .def("prepare_forward", &Reducer::prepare_forward, py::arg("is_for_training"),
           py::call_guard<ReleasedGil>(),
           "Waits for what a backward that raised left under way; raises pydist.InvalidUsage where "
           "a parameter has changed its type.")
      .def("expect_any_order", &Reducer::expect_any_order,
           "A schedule chooses the order of backwards, so nothing is warned of that.")
      .def_property_readonly("has_left_out_average", &Reducer::has_left_out_average,
                             "Whether the last backward came from a forward that averages, and "
                             "accumulated nothing, as that of torch.autograd.grad.")
      .def("note_forward", &Reducer::note_forward,
           "After a forward whose outputs may go backward: one that no output of a forward "
           "announces "
           "averages if this one was to.")
      .def("watch", &Reducer::watch, py::arg("output"),
           "Announces the backward that will start from an output of forward, and whether it "
           "averages.")
      .def(
          "add",
          [](Reducer& self, const std::string& name, const at::Tensor& parameter, bool is_sparse,
             int owner, std::optional<at::Tensor> shown) {
            self.add({name, parameter, is_sparse, owner, shown.value_or(at::Tensor())});
          },
          py::arg("name"), py::arg("parameter"), py::arg("is_sparse"), py::arg("owner") = 0,
          py::arg("shown") = py::none(),
          "Averages a parameter that was unfrozen or joined the model, too. `owner` and `shown` as "
          "in shard().")
      .def(
          "shard",
          [](Reducer& self, int owner, int stage, const std::vector<std::size_t>& slots,
             const std::vector<at::Tensor>& shown) {
            calling_python([&] { self.shard(owner, stage, slots, shown); });
          },
          py::arg("owner"), py::arg("stage"), py::arg("slots"), py::arg("shown"),
          "All ranks call: an optimizer, known by a number from 1, updates shards of the "
          "parameters "
          "with these indices; `shown` are what stands for their gradients.")
      .def("sharded_buckets", &sharded_buckets, py::arg("owner"),
           "The buckets of an optimizer, in the order of launching: number (for good), label, "
           "members (index of the parameter, offset in the bucket, strides), layout, and this "
           "rank's shard of the gradients.")
      .def(
          "berth_bytes",
          [](const Reducer& self, int owner) { return self.arena().berth_bytes(owner); },
          py::arg("owner"), "What an optimizer's buckets share, in stage 2.")
      .def(
          "vote",
          [](Reducer& self, bool refuses, std::uint64_t options) {
            const Reducer::Vote vote = [&] {
              const ReleasedGil released;
              return self.vote(refuses, options);
            }();
            return py::make_tuple(vote.refused, vote.went_backward, vote.all_in_step,
                                  vote.options_agree);
          },
          py::arg("refuses"), py::arg("options"),
          "All ranks call before an optimizer of theirs steps; `options` is a digest of 64 bits. "
          "Returns the ranks that refuse, those that went backward instead, which fails there and "
          "drops the gradients here, whether all are in step() of one optimizer, and whether "
          "options agree.")
      .def(
          "watch_shards",
          [](Reducer& self, int owner, py::function watcher) {
            self.watch_shards(owner, [held = hold_function(std::move(watcher))](
                                         const GradientBucket& bucket, const WorkPtr& work) {
              const py::gil_scoped_acquire gil;
              const py::object shown =
                  work == nullptr ? py::none() : python_work(work, /*rank=*/-1, {bucket.shard});
              call_python<void>(*held, bucket.number, shown);
            });
          },
          py::arg("owner"), py::arg("watcher"),
          "Around each launch of a bucket of an optimizer, on the launching thread and its "
          "streams, "
          "`watcher(number, work)` is called: before it with None, after it with what fills the "
          "shard. Not in rounds that are given up or captured.")
      .def("set_stepping", &Reducer::set_stepping, py::arg("owner"),
           "Tells in step() of which optimizer, by its number, this rank is from now on; 0: of "
           "none.")
      .def("note_changed_buffers", &Reducer::note_changed_buffers, py::arg("first"),
           py::arg("digest"),
           "Tells that the program has changed buffers since the last round: the number of the "
           "first, from 1, and a digest of their values, for the next round to compare.")
      .def_property_readonly("first_differing_buffer", &Reducer::first_differing_buffer,
                             "The number, from 1, of the first buffer in which the ranks of the "
                             "present round differ by what note_changed_buffers() said; 0: none.")
      .def_property_readonly(
          "shardings", [](const Reducer& self) { return self.arena().shardings(); },
          "How often buckets were given to optimizers; more than before: there are new ones.")
      .def(
          "register_comm_hook",
          [](Reducer& self, py::object state, py::object hook, bool plans_anew) {
            self.set_hook(std::make_shared<c10d::PythonCommHook>(std::move(state), std::move(hook)),
                          plans_anew);
          },
          py::arg("state"), py::arg("hook"), py::arg("plans_anew"),
          "Lets `hook(state, bucket)` average the buckets: it returns a future of the tensor. "
          "Called once, before the first backward. `plans_anew`: each rank asks the planner, which "
          "has the same buckets on all.")
      .def("require_shardable", &Reducer::require_shardable,
           "Raises pydist.InvalidUsage where no optimizer can have shards of the average.")
      .def_property("enabled", &Reducer::is_enabled, &Reducer::set_enabled,
                    "Whether backwards from forwards that end from now on are synchronised.")
      .def_property(
          "weight",
          [](const Reducer& self) -> std::optional<std::variant<double, at::Tensor>> {
            const std::optional<Weight>& weight = self.weight();
            if (!weight) {
              return std::nullopt;
            }
            const auto* const number = std::get_if<double>(&*weight);
            return number != nullptr ? std::variant<double, at::Tensor>(*number)
                                     : std::get<DeviceNumber>(*weight).on_current_stream();
          },
          [](Reducer& self, const std::optional<std::variant<at::Tensor, double>>& weight) {
            if (!weight) {
              self.set_weight(std::nullopt);
            } else if (const auto* const number = std::get_if<double>(&*weight)) {
              self.set_weight(*number);
            } else {
              const at::Tensor& there = std::get<at::Tensor>(*weight);
              if (!there.is_cuda() || there.scalar_type() != at::kDouble || there.dim() != 0) {
                throw InvalidUsage("a weight on a device is a float64 tensor without dimensions");
              }
              self.set_weight(DeviceNumber(there));
            }
          },
          "What backwards that begin from now on count for: a number, or a float64 tensor without "
          "dimensions on `device_of_weights`, NaN where it is no weight; None: each rank as one.")
      .def_property_readonly(
          "device_of_weights",
          [](const Reducer& self) -> std::optional<std::string> {
            const std::optional<Device> device = self.device_of_weights();
            return device ? std::optional(torch_device(*device).str()) : std::nullopt;
          },
          "Where weights stay that a GPU computes; None: the host reads them.")
      .def_property_readonly("is_capturing", &Reducer::is_capturing,
                             "Whether what backward does now is captured into a CUDA graph.")
      .def_property("holding", &Reducer::is_holding, &Reducer::set_holding,
                    "Whether backwards that end from now on hold their rounds: they return before "
                    "gradients are averaged, and conclude_held() does the rest.")
      .def_property_readonly(
          "is_held", &Reducer::is_held,
          "Whether a round is held. A forward with gradients enabled, or whatever "
          "else begins before conclude_held(), gives it up.")
      .def(
          "conclude_held", [](Reducer& self) { calling_python([&] { self.conclude_held(); }); },
          "All ranks call: concludes the round that is held, if one is. Raises "
          "pydist.InvalidUsage where it was lost.")
      .def(
          "give_up_held", [](Reducer& self) { calling_python([&] { self.give_up_held(); }); },
          "Tells the other ranks that the round that is held, if one is, is worth nothing.")
      .def_property_readonly("why_lost", &Reducer::why_lost,
                             "Why a round that was held is lost, until a backward averages; \"\": "
                             "none is.")
      .def(
          "synchronize",
          [](Reducer& self, const py::function& require) {
            calling_python([&] {
              self.synchronize([&] {
                const py::gil_scoped_acquire gil;
                require();
              });
            });
          },
          py::arg("require"),
          "Averages what was accumulated or set by hand and was not averaged; all ranks call. "
          "Where `require` raises on one, the others raise that it has.")
      .def(
          "set_joining",
          [](Reducer& self, const std::string& joining, bool throws_on_first) {
            self.set_joining(joining_of(joining), throws_on_first);
          },
          py::arg("joining"), py::arg("throws_on_first"),
          "What a rank without a batch counts for: 'zeros', or nothing ('absent'); '' if there "
          "is none.")
      .def(
          "join_round",
          [](Reducer& self) { return calling_python([&] { return self.join_round(); }); },
          "Takes part in a round of the others; returns whether any rank still has batches.")
      .def("leave_join", &Reducer::leave_join, py::call_guard<ReleasedGil>(),
           "Tells the others, in a round of theirs or when they leave too, that this rank raised "
           "within join().")
      .def("retire", &Reducer::retire, py::arg("reason"), py::call_guard<ReleasedGil>(),
           "Takes the hooks away for good, because another one averages some of the parameters. A "
           "backward from an earlier forward then raises pydist.InvalidUsage with the reason.")
      .def_property_readonly("round", &Reducer::round,
                             "Grows with every round; the same on all ranks.")
      .def_property_readonly("rounds_concluded", &Reducer::rounds_concluded,
                             "How many rounds have come to their end, where nobody raised.")
      .def_property_readonly(
          "is_in_backward",
          py::cpp_function(&Reducer::is_in_backward, py::call_guard<ReleasedGil>()),
          "Whether a backward that synchronises is under way.")
      .def_property_readonly(
          "parameters",
          [](const Reducer& self) {
            std::vector<at::Tensor> parameters;
            for (const GradientSlot& slot : self.arena().slots()) {
              parameters.push_back(slot.parameter);
            }
            return parameters;
          },
          "All that it averages.")
      .def("averages", &Reducer::averages, py::arg("parameter"),
           "Whether it averages the gradients of a parameter. May be asked while another thread is "
           "in its backward.")
      .def("await_thrown", &Reducer::await_thrown, py::call_guard<ReleasedGil>(),
           "Outside of backward: waits until autograd has let go of a backward that has raised.")
      .def_property_readonly("has_pending", &Reducer::has_pending,
                             "Whether a gradient was accumulated and not averaged.")
      .def_property_readonly("has_bypassed", &Reducer::has_bypassed,
                             "Whether a backward has accumulated since the last round because it "
                             "came from no forward.")
      .def_property_readonly("pending", &Reducer::pending, "The parameters that hold one.")
      .def_property_readonly(
          "accumulated",
          [](const Reducer& self) {
            const ReleasedGil released;  // who has the turn may wait for it
            return self.accumulated();
          },
          "The parameters that hold one, which may have been set to zero: nothing is read. May be "
          "asked within a backward.")
      .def_property_readonly("buckets", &buckets_of,
                             "(label, bytes, indices of parameters), in the order of launching.")
      .def_property_readonly("stats", [](const Reducer& self) { return self.stats(); })
      .def("reset_stats", &Reducer::reset_stats, "Starts counting from zero.");
}

}  // namespace pydist
