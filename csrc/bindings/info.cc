// What the module was built with, and the engine's environment variables.

#include <pybind11/stl.h>
#include <torch/version.h>

#include <cstdlib>
#include <map>
#include <string>
#include <tuple>

#include "base/env.h"
#include "base/log.h"
#include "bindings/bindings.h"
#include "kernels/cpu/reduce.h"
#include "kernels/cuda/library.h"
#include "topology/hosts.h"

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

std::vector<std::tuple<std::string, std::string>> unknown_variables() {
  std::vector<std::tuple<std::string, std::string>> result;
  for (const UnknownVariable& variable : unknown_environment_variables()) {
    result.emplace_back(variable.name, variable.nearest);
  }
  return result;
}

template <typename Duration>
double seconds(Duration duration) {
  return std::chrono::duration<double>(duration).count();
}

Environment read_environment() {
  Environment environment = Environment::read();
  set_log_levels(environment.log_levels);
  return environment;
}

void bind_environment(py::module_& module) {
  py::class_<Environment>(module, "Environment", "The validated values of the PYDIST_ variables.")
      .def_property_readonly("backend",
                             [](const Environment& self) { return to_string(self.backend); })
      .def_property_readonly("algorithm",
                             [](const Environment& self) { return to_string(self.algorithm); })
      .def_property_readonly(
          "timeout", [](const Environment& self) { return seconds(self.timeout); }, "In seconds.")
      .def_readonly("host_id", &Environment::host_id)
      .def_property_readonly(
          "spin_us",
          [](const Environment& self) {
            return self.spin ? std::optional<std::int64_t>(self.spin->count()) : std::nullopt;
          },
          "In microseconds; None where the engine decides.")
      .def_readonly("chunk_bytes", &Environment::chunk_bytes)
      .def_readonly("staging_bytes", &Environment::staging_bytes)
      .def_property_readonly(
          "heartbeat_warning",
          [](const Environment& self) { return seconds(self.heartbeat_warning); }, "In seconds.")
      .def_readonly("cpu_isa", &Environment::cpu_isa)
      .def_readonly("debug", &Environment::debug)
      .def_readonly("timeline", &Environment::timeline)
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

py::dict build_info() {
  py::dict result;
#if defined(__clang__)
  result["compiler"] = "clang " __clang_version__;
#else
  result["compiler"] = "g++ " __VERSION__;
#endif
  result["torch"] = TORCH_VERSION;
  result["pybind11"] = join(PYBIND11_VERSION_MAJOR, ".", PYBIND11_VERSION_MINOR);
  result["cpu_isa"] = to_string(chosen_instruction_set());
  py::list usable;
  for (const InstructionSet set : usable_instruction_sets()) {
    usable.append(py::str(std::string(to_string(set))));
  }
  result["usable_cpu_isas"] = usable;
  result["cuda"] = false;
  return result;
}

}  // namespace

void bind_info(py::module_& module) {
  module.def("environment_variables", &variables,
             "Every PYDIST_ variable of the engine: (name, values, default, meaning, current value "
             "or None).");
  module.def(
      "unknown_variables", &unknown_variables,
      "Set variables that start with PYDIST_ and are not known: (name, nearest known name).");
  bind_environment(module);
  module.def("read_environment", &read_environment,
             "The variables' validated values, of which the log level takes effect; raises "
             "pydist.InvalidUsage for one that is not valid.");
  module.def("build_info", &build_info, "What the module was built with, and the CPU's kernels.");
  module.def(
      "cuda_kernels_obstacle",
      [](int device) {
        const ReleasedGil released;
        return CudaLibrary::get().reason_not_to_run_on(device);
      },
      py::arg("device"),
      "Why pydist's CUDA kernels cannot run on a device, in a sentence; empty where they can. "
      "Starts the driver, and opens a context on the device.");
  module.def(
      "processor_quota", [] { return processor_quota(); },
      "The processors' worth of time that the cgroups grant; None without a limit.");
  module.def("set_log_rank", &set_log_rank, py::arg("rank"),
             "The rank that this process's log lines carry; -1 leaves it out.");
}

}  // namespace pydist
