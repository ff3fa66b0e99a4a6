// What `pydist doctor` reads of processes that are not its own.

#include <pybind11/stl.h>

#include <algorithm>
#include <array>

#include "base/enum_names.h"
#include "base/op_kind.h"
#include "bindings/bindings.h"
#include "health/page_reader.h"
#include "topology/cgroup.h"

namespace pydist {
namespace {

// Both may come from a byte of somebody else's memory, which may hold anything.
std::string_view name_of(JournalState state) {
  constexpr std::array<std::string_view, 3> kNames = {"running", "succeeded", "failed"};
  return name_in(kNames, state, "unknown");
}

std::string_view kind_of(const JournalEntry& entry) {
  return name_in(kOpKindNames, entry.kind, "unknown");
}

py::dict read(int fd) {
  PageReading reading;
  {
    const ReleasedGil released;
    reading = read_page(fd);
  }
  const auto seconds_since = [&](std::int64_t time_ns) {
    return static_cast<double>(std::max<std::int64_t>(0, reading.now_ns - time_ns)) * 1e-9;
  };
  py::list entries;
  for (const JournalEntry& entry : reading.entries) {
    py::dict each;
    each["group"] = entry.group;
    each["sequence"] = entry.sequence;
    each["kind"] = kind_of(entry);
    each["state"] = name_of(entry.state);
    each["bytes"] = entry.bytes;
    each["label"] = py::bytes(entry.label).attr("decode")("utf-8", "replace");
    each["started_s"] = seconds_since(entry.started_ns);
    each["finished_s"] = entry.state == JournalState::kRunning
                             ? py::object(py::none())
                             : py::object(py::float_(seconds_since(entry.finished_ns)));
    entries.append(each);
  }
  py::dict result;
  result["pid"] = reading.pid;
  result["rank"] = reading.rank < 0 ? py::object(py::none()) : py::object(py::int_(reading.rank));
  result["has_departed"] = reading.has_departed;
  result["silent_s"] = reading.silent_s;
  result["entries"] = entries;
  return result;
}

}  // namespace

void bind_diagnosis(py::module_& module) {
  module.def(
      "is_frozen", [](pid_t pid) { return is_frozen(pid); }, py::arg("pid"),
      "Whether a process of this host is stopped by the freezer of its cgroup.");
  module.def("read_page", &read, py::arg("fd"),
             "The page of a process of pydist, behind a descriptor: its pid, its rank (None before "
             "it has joined a job), whether the process has left in good order, the seconds since "
             "its last sign of life, and its last operations, the newest first, each with the "
             "seconds since it began and ended. Raises pydist.InvalidUsage where the file is no "
             "such page.");
}

}  // namespace pydist
