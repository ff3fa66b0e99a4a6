// What the ranks of a native group learn of each other through the store when they meet.
//
// Note [Who learns what]
// Rank 0 reads the introductions of all ranks, and makes of them what the others read. Every rank
// reads the roster, so p times p of its entries go through the store: an entry has what is needed
// of a rank of another host, and takes some twenty bytes. The cards, which are far longer, are for
// the ranks of their own host, under a key for each host. Nothing is left to be read later: when
// two ranks connect for the first time, the store may be gone. Values.

#pragma once

#include <string>
#include <vector>

#include "communicator/peers/endpoint.h"
#include "communicator/peers/introduction.h"
#include "health/known_processes.h"
#include "topology/key_value_store.h"
#include "topology/placement.h"
#include "transport/tcp/tcp_node.h"

namespace pydist {

// Of the ranks of one host.
struct HostRoster {
  std::vector<Card> cards;  // in ascending order of rank
  // Whether each of them can have a core of its own: other hosts may be on the same machine, as
  // containers are.
  bool has_core_for_every_rank = false;

  [[nodiscard]] std::string to_text() const;
  [[nodiscard]] static HostRoster from_text(const std::string& text);
};

struct Roster {
  std::string token;          // rank 0's, as in Introduction
  std::string secret_folder;  // where rank 0 has left the secret, in a file named `token`
  Placement placement{0};
  std::vector<Acquaintance> ranks;  // all, by rank
  HostRoster host;                  // where all are on one; otherwise empty

  [[nodiscard]] std::string to_text() const;
  [[nodiscard]] static Roster from_text(const std::string& text);
};

// For rank 0, which has all introductions: the roster. Where the ranks are on several hosts, it
// also writes that of each into the store; `topic` is that of the introductions.
[[nodiscard]] Roster hand_out(KeyValueStore& store, const std::string& topic,
                              const std::vector<Introduction>& introductions,
                              const std::string& secret_folder = {});

// That of `host`, for those who have the whole one. Throws what the store does.
[[nodiscard]] HostRoster roster_of_host(KeyValueStore& store, const std::string& topic,
                                        const Roster& roster, int host, Deadline deadline);

// How the ranks of several hosts reach each other.
struct NetworkRoster {
  std::string secret;           // as rank 0 has told it
  std::vector<NodeCard> cards;  // by rank

  [[nodiscard]] std::string to_text() const;
  [[nodiscard]] static NetworkRoster from_text(const std::string& text);
  // For rank 0: of what all say, by rank, as NetworkIntroduction. Throws where one of the ranks of
  // the group `name`, which are `processes`, can't be reached.
  [[nodiscard]] static NetworkRoster of(const std::vector<std::string>& introductions,
                                        const KnownProcesses& processes, const std::string& name);
};

}  // namespace pydist
