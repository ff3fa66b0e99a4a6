// What the ranks of a native group say to each other when they meet. NativeIntroduction and
// make_native_roster: for a caller that sends it together with something else. rehearse_meeting:
// says it and makes no group, for bench/meeting.py.

#include <unistd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/env.h"
#include "communicator/native/group_meeting.h"
#include "communicator/peers/introduction.h"
#include "communicator/peers/own_introduction.h"
#include "communicator/peers/roster.h"
#include "health/known_processes.h"
#include "memory/job_secret.h"
#include "memory/memory_room.h"
#include "topology/hosts.h"
#include "topology/rendezvous.h"

#include "bindings/arguments.h"
#include "bindings/bindings.h"
#include "c10d/store.h"

namespace pydist {
namespace {

// As that of a process of this machine, but on one of several hosts.
Introduction introduction_of(int rank, int ranks_per_host) {
  Introduction mine;
  mine.card.address = join("pydist-", random_token());
  mine.card.host_identity = join(host_identity(std::nullopt), " ", rank / ranks_per_host);
  mine.card.host_name = join("host-", rank / ranks_per_host);
  mine.card.pid = ::getpid() + rank % ranks_per_host;
  mine.card.pid_namespace = "pid:[4026531836]";
  mine.card.page_number = std::hash<std::string>()(mine.card.address);
  mine.card.memory_limits = memory_limits();
  mine.card.processors = allowed_processors();
  mine.settings = settings_text(Environment());
  if (rank == 0) {
    mine.token = random_token();
  }
  return mine;
}

NodeCard node_card_of(int rank, int ranks_per_host) {
  const int host = rank / ranks_per_host;
  return {random_token(),
          join("machine ", host),
          {join("10.0.", host / 256, ".", host % 256, " port ", 40'000 + rank % ranks_per_host)}};
}

void rehearse_meeting(c10::intrusive_ptr<c10d::Store> torch_store, int rank, int size,
                      int ranks_per_host, double timeout_s) {
  const ReleasedGil released;
  const StorePtr store = adapt_store(std::move(torch_store), kStorePatience, size);
  const Deadline deadline = Deadline::in(milliseconds_in(timeout_s));
  const auto hear = [&](const std::string& topic, const std::string& mine,
                        const Summarize& summarize) {
    return exchange(*store, topic, rank, size, mine, summarize, deadline, [](int) {});
  };
  KnownProcesses processes = strangers(size);
  const std::string topic = "introduction";
  const Introduction mine = introduction_of(rank, ranks_per_host);
  const auto make_roster = [&](const std::vector<std::string>& texts) {
    return hand_out(*store, topic, read_introductions(texts, processes, "rehearsed")).to_text();
  };
  const Roster roster = Roster::from_text(hear(topic, mine.to_text(), make_roster));
  if (roster.placement.spans_hosts()) {
    NetworkIntroduction on_network;
    on_network.card = node_card_of(rank, ranks_per_host);
    const auto make_network_roster = [&](const std::vector<std::string>& texts) {
      return NetworkRoster::of(texts, processes, "rehearsed").to_text();
    };
    const NetworkRoster network =
        NetworkRoster::from_text(hear("network", on_network.to_text(), make_network_roster));
    PYDIST_CHECK(network.cards.at(static_cast<std::size_t>(rank)).addresses ==
                 on_network.card.addresses);
  }
  const std::vector<Card> cards =
      roster_of_host(*store, topic, roster, roster.placement.host_of(rank), deadline).cards;
  const auto place = static_cast<std::size_t>(roster.placement.index_on_host(rank));
  PYDIST_CHECK(cards.at(place).to_text() == mine.card.to_text());
  // As for the verdict: rank 0 hears of the lowest rank of each host that its ranks share memory.
  const auto leader_of = [&](int host) { return roster.placement.leader_of(host); };
  if (rank != leader_of(roster.placement.host_of(rank))) {
    return;
  }
  if (rank != 0) {
    store->set(join("joined/", rank), "");
    static_cast<void>(get_while_hoping(*store, "verdict", deadline, [] {}));
    return;
  }
  for (int host = 1; host < roster.placement.hosts(); ++host) {
    static_cast<void>(get_while_hoping(*store, join("joined/", leader_of(host)), deadline, [] {}));
    store->erase(join("joined/", leader_of(host)));
  }
  static_cast<void>(store->settle("verdict", "stands"));
}

py::bytes make_roster(OwnIntroduction& own, c10::intrusive_ptr<c10d::Store> torch_store,
                      const std::string& name, const std::vector<py::bytes>& introductions,
                      const ProcessTuples& processes) {
  const std::vector<std::string> texts(introductions.begin(), introductions.end());
  std::string roster;
  {
    const ReleasedGil released;
    const StorePtr store =
        adapt_store(std::move(torch_store), kStorePatience, static_cast<int>(texts.size()));
    KnownProcesses known = known_processes(processes);
    roster = make_native_roster(own, *store, name, texts, known);
  }
  return {roster};
}

}  // namespace

void bind_meeting(py::module_& module) {
  py::class_<OwnIntroduction, std::shared_ptr<OwnIntroduction>>(
      module, "NativeIntroduction",
      "What this process says of itself to the ranks of a native group that it is about to meet as "
      "rank `rank`, and what it keeps for them until they have met.")
      .def(py::init([](int rank) {
             return std::make_shared<OwnIntroduction>(rank, Environment::read());
           }),
           py::arg("rank"), py::call_guard<ReleasedGil>())
      .def_property_readonly(
          "text", [](const OwnIntroduction& self) { return py::bytes(self.text()); },
          "As Introduction::to_text(), in no encoding.")
      .def("end", &OwnIntroduction::end, py::call_guard<ReleasedGil>(),
           "The ranks have met, or will not. Idempotent.");
  module.def("make_native_roster", &make_roster, py::arg("own"), py::arg("store"), py::arg("name"),
             py::arg("introductions"), py::arg("processes"),
             "For rank 0: what all ranks of the group `name` need, by `create_native`, made of the "
             "texts of their introductions, in rank order. `store` as for that, `processes` as "
             "well. Raises TransportError where they can't make up a group, Mismatch where they "
             "are not set alike.");
  module.def(
      "rehearse_meeting", &rehearse_meeting, py::arg("store"), py::arg("rank"), py::arg("size"),
      py::arg("ranks_per_host"), py::arg("timeout"),
      "Says and hears what rank `rank` of a native group does through `store` when the ranks "
      "meet, and makes no group. Consecutive ranks share a host. All ranks call it. "
      "`timeout` in seconds.");
}

}  // namespace pydist
