// pydist._native.Placement, and what else decides by which way data goes between hosts.

#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "collectives/group_segment.h"
#include "collectives/shared_memory/route.h"
#include "memory/shared_segment.h"
#include "topology/placement.h"

#include "bindings/arguments.h"
#include "bindings/bindings.h"

namespace pydist {
namespace {

std::vector<int> hosts_of(const Placement& placement) {
  std::vector<int> hosts;
  for (int rank = 0; rank < placement.size(); ++rank) {
    hosts.push_back(placement.host_of(rank));
  }
  return hosts;
}

std::vector<std::vector<int>> ranks_by_host(const Placement& placement) {
  std::vector<std::vector<int>> ranks;
  for (int host = 0; host < placement.hosts(); ++host) {
    ranks.emplace_back(placement.ranks_on(host).begin(), placement.ranks_on(host).end());
  }
  return ranks;
}

int counterpart(const Placement& placement, int rank, int host) {
  if (rank < 0 || rank >= placement.size() || host < 0 || host >= placement.hosts()) {
    throw InvalidUsage(join("rank ", rank, " and host ", host, " are not of ", placement.size(),
                            " ranks on ", placement.hosts(), " hosts."));
  }
  return placement.counterpart(rank, host);
}

std::size_t sent_ahead_limit(KindArgument kind, int ranks, std::size_t chunk_bytes,
                             std::optional<std::size_t> one_shot_bytes) {
  const std::size_t chunk = round_up(chunk_bytes, page_bytes());
  return ranks == 1
             ? 0
             : std::max(kInlineBytes, one_shot_limit(kind.kind, ranks, chunk, one_shot_bytes));
}

}  // namespace

void bind_placement(py::module_& module) {
  py::class_<Placement>(module, "Placement",
                        "The ranks of a group on their hosts, which are numbered by their lowest "
                        "rank, the host's leader.")
      .def(py::init<const std::vector<std::string>&>(), py::arg("identities"),
           "`identities`: host_identity() of each rank, in rank order.")
      .def_property_readonly("ranks", &Placement::size, "How many.")
      .def_property_readonly("hosts", &Placement::hosts, "How many.")
      .def_property_readonly("host_of", &hosts_of, "The number of each rank's host, by rank.")
      .def_property_readonly("ranks_on", &ranks_by_host,
                             "The ranks of each host, in ascending order.")
      .def_property_readonly("least_on_a_host", &Placement::least_on_a_host,
                             "The least number of ranks on a host.")
      .def("counterpart", &counterpart, py::arg("rank"), py::arg("host"),
           "The rank of a host that hears what `rank` has for all ranks there.");
  module.def(
      "sent_ahead_limit", &sent_ahead_limit, py::arg("kind"), py::arg("ranks"),
      py::arg("chunk_bytes"), py::arg("one_shot_bytes"),
      "The most bytes of a rank that go with its announcement of a collective, or ahead of "
      "it; `chunk_bytes` is PYDIST_CHUNK_BYTES, and `one_shot_bytes` PYDIST_ONE_SHOT_BYTES, or "
      "None.");
}

}  // namespace pydist
