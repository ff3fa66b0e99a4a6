// What the module was built with, and the engine's environment variables.

#include <pybind11/stl.h>

#include <cstdlib>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "base/env.h"
#include "base/fork.h"
#include "base/log.h"
#include "bindings/bindings.h"
#include "kernels/cpu/reduce.h"
#include "kernels/cuda/library.h"
#include "memory/memory_room.h"
#include "topology/hosts.h"
#include "transport/tcp/interfaces.h"

namespace pydist {
namespace {

using Variable =
    std::tuple<std::string, std::string, std::string, std::string, std::optional<std::string>>;

std::vector<Variable> variables() {
  std::vector<Variable> result;
  for (const EnvironmentVariable& variable : environment_variables()) {
    const std::string name(variable.name);
    const char* const current = std::getenv(name.c_str());
    std::optional<std::string> shown;
    if (current != nullptr) {
      shown = name == "PYDIST_JOB_SECRET" ? "(a secret)" : current;
    }
    result.emplace_back(name, variable.values, variable.default_value, variable.meaning, shown);
  }
  return result;
}

Environment read_environment() {
  Environment environment = Environment::read();
  set_log_levels(environment.log_levels);
  return environment;
}

void bind_environment(py::module_& module) {
  py::class_<Environment>(module, "Environment", "The validated values of the PYDIST_ variables.")
      .def_property_readonly(
          "timeout",
          [](const Environment& self) {
            return std::chrono::duration<double>(self.timeout).count();
          },
          "In seconds.")
      .def_readonly("debug", &Environment::debug)
      .def_property_readonly(
          "algorithm",
          [](const Environment& self) { return std::string(to_string(self.algorithm)); })
      .def_property_readonly(
          "tuning", [](const Environment& self) { return std::string(to_string(self.tuning)); },
          "on, uncached or off.")
      .def_readonly("chunk_bytes", &Environment::chunk_bytes)
      .def_readonly("one_shot_bytes", &Environment::one_shot_bytes)
      .def_property_readonly(
          "sockets", [](const Environment& self) { return self.network.sockets; },
          "Connections that each end makes to another process; None: one on the same machine, two "
          "otherwise.")
      .def_property_readonly(
          "log_levels",
          [](const Environment& self) {
            std::map<std::string, std::string> levels{
                {"", std::string(to_string(self.log_levels.all))}};
            for (const auto& [subsystem, level] : self.log_levels.of_subsystems) {
              levels[subsystem] = to_string(level);
            }
            return levels;
          },
          "What is logged: the least level, by subsystem; under \"\" that of all others.");
}

std::vector<std::string> texts_of(const std::vector<SocketAddress>& addresses) {
  std::vector<std::string> texts;
  for (const SocketAddress& address : addresses) {
    texts.push_back(address.host());
  }
  return texts;
}

std::vector<std::string> own_told_addresses(std::optional<std::string> address) {
  NetworkSettings settings = Environment::read().network;
  settings.address = std::move(address);
  return texts_of(told_addresses(settings));
}

void bind_network(py::module_& module) {
  py::class_<NetworkInterface>(module, "NetworkInterface", "One of this host's, as it is now.")
      .def_readonly("name", &NetworkInterface::name)
      .def_readonly("is_loopback", &NetworkInterface::is_loopback)
      .def_readonly("is_up", &NetworkInterface::is_up)
      .def_readonly("is_running", &NetworkInterface::is_running, "Whether it has a link, too.")
      .def_property_readonly(
          "mtu_bytes", [](const NetworkInterface& self) { return mtu_bytes_of(self.name); },
          "Of the largest packet; None where the system does not know.")
      .def_property_readonly(
          "mbit_per_s", [](const NetworkInterface& self) { return mbit_per_s_of(self.name); },
          "As its driver tells; None where it does not.")
      .def_property_readonly(
          "addresses", [](const NetworkInterface& self) { return texts_of(self.addresses); },
          "IPv4 first, without link-local ones of IPv6.");
  module.def("network_interfaces", &network_interfaces,
             "The interfaces of this process's network namespace.");
  module.def("told_addresses", &own_told_addresses, py::arg("address"),
             "The addresses that other hosts are told to connect to: those of PYDIST_INTERFACE; "
             "without it `address`, by which the job is reached, or all where that is None.");
}

std::vector<std::string_view> usable_cpu_isas() {
  std::vector<std::string_view> usable;
  for (const InstructionSet set : usable_instruction_sets()) {
    usable.push_back(to_string(set));
  }
  return usable;
}

}  // namespace

void bind_info(py::module_& module) {
  module.def("environment_variables", &variables,
             "Every PYDIST_ variable of the engine: (name, values, default, meaning, current value "
             "or None).");
  bind_environment(module);
  bind_network(module);
  module.def("read_environment", &read_environment,
             "The variables' validated values, of which the log level takes effect; raises "
             "pydist.InvalidUsage for one that is not valid.");
  module.def("usable_cpu_isas", &usable_cpu_isas,
             "The instruction sets that the CPU's kernels can use; they use the last one.");
  module.def(
      "cuda_kernels_obstacle",
      [](int device) { return CudaLibrary::get().reason_not_to_run_on(device); }, py::arg("device"),
      py::call_guard<ReleasedGil>(),
      "Why pydist's CUDA kernels cannot run on a device, in a sentence; empty where they can. "
      "Starts the driver, and opens a context on the device.");
  module.def(
      "host_identity", [] { return host_identity(Environment::read_host_id()); },
      "The same text on two ranks only if they may share memory: PYDIST_HOST_ID, or the boot of "
      "the machine and the network namespace.");
  module.def(
      "processor_quota", [] { return processor_quota(); },
      "The processors' worth of time that the cgroups grant; None without a limit.");
  module.def(
      "tasks_left", [] { return tasks_left(); },
      "How many processes and threads more the cgroups grant; None without a limit.");
  module.def(
      "memory_room",
      [] {
        MemoryRoom room = memory_room();
        return std::pair(room.bytes, std::move(room.limited_by));
      },
      "How many bytes more this process may take before the machine or a cgroup runs out, and what "
      "limits them.");
  module.def("require_not_forked", &require_not_forked,
             "Raises pydist.InvalidUsage where this process was forked while a group was at work.");
}

}  // namespace pydist
