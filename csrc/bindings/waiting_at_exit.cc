// Waiting for the other ranks of a script that has started them, when its own program has ended.

#include <string>
#include <utility>
#include <vector>

#include "base/children_at_exit.h"
#include "bindings/bindings.h"

namespace pydist {

void bind_waiting_at_exit(py::module_& module) {
  module.def(
      "wait_for_children_at_exit",
      [](const std::vector<std::pair<std::string, int>>& children, double grace_s,
         int failed_status, const std::string& failed_words) {
        std::vector<Child> all;
        for (const auto& [name, pid] : children) {
          all.push_back({name, pid});
        }
        wait_for_children_at_exit(std::move(all), milliseconds_in(grace_s),
                                  {failed_status, failed_words});
      },
      py::arg("children"), py::arg("grace_s"), py::arg("failed_status"), py::arg("failed_words"),
      "Has the exit of this process wait for some of its children, given by name and pid.");
}

}  // namespace pydist
