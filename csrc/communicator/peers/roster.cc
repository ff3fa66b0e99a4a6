#include "communicator/peers/roster.h"

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "memory/sha256.h"
#include "topology/hosts.h"
#include "topology/packed_rows.h"
#include "topology/rendezvous.h"

namespace pydist {
namespace {

std::string bytes_of_number(std::uint64_t number) {
  std::string bytes(sizeof number, '\0');
  std::memcpy(bytes.data(), &number, sizeof number);
  return bytes;
}

std::uint64_t number_of_bytes(const std::string& bytes) {
  std::uint64_t number = 0;
  PYDIST_CHECK(bytes.size() == sizeof number);
  std::memcpy(&number, bytes.data(), sizeof number);
  return number;
}

// Half as long as the hexadecimal text, as random_token() makes it.
std::string bytes_of_hex(const std::string& text) {
  std::string bytes;
  PYDIST_CHECK(text.size() % 2 == 0);
  for (std::size_t at = 0; at < text.size(); at += 2) {
    unsigned char byte = 0;
    const auto [end, error] = std::from_chars(&text[at], &text[at] + 2, byte, 16);
    PYDIST_CHECK(error == std::errc() && end == &text[at] + 2);
    bytes += static_cast<char>(byte);
  }
  return bytes;
}

std::string hex_of_bytes(const std::string& bytes) {
  return to_hex({reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size()});
}

std::string host_key(const std::string& topic, int host) { return join(topic, "/host ", host); }

std::string pack_cards(const std::vector<Card>& cards) {
  std::vector<Row> rows;
  for (const Card& card : cards) {
    rows.push_back(unpack(card.to_text()));
  }
  return pack_rows(rows);
}

std::vector<Card> unpack_cards(const std::string& text) {
  std::vector<Card> cards;
  for (const Row& row : unpack_rows(text)) {
    cards.push_back(Card::from_text(pack(row)));
  }
  return cards;
}

// Names of the machines that have a core for every rank on them, whatever host it is on.
std::set<std::string> roomy_machines(const std::vector<Introduction>& introductions) {
  std::map<std::string, std::vector<ProcessorGrant>> machines;
  for (const Introduction& each : introductions) {
    // A quota is that of a host: of a container.
    machines[each.card.machine].push_back({each.card.processors, std::nullopt});
  }
  std::set<std::string> roomy;
  for (const auto& [name, grants] : machines) {
    // Without a name it may be several.
    if (name.empty() || has_core_for_every_rank(grants)) {
      roomy.insert(name);
    }
  }
  return roomy;
}

}  // namespace

std::string HostRoster::to_text() const {
  return pack({has_core_for_every_rank ? "roomy" : "", pack_cards(cards)});
}

HostRoster HostRoster::from_text(const std::string& text) {
  const std::vector<std::string> parts = unpack(text);
  PYDIST_CHECK(parts.size() == 2);
  return {unpack_cards(parts[1]), !parts[0].empty()};
}

std::string Roster::to_text() const {
  std::vector<Row> rows;
  for (const Acquaintance& each : ranks) {
    rows.push_back({std::to_string(placement.host_of(static_cast<int>(rows.size()))),
                    each.host_name, std::to_string(each.pid), bytes_of_number(each.page_number)});
  }
  return pack({token, secret_folder, pack_rows(rows), host.to_text()});
}

Roster Roster::from_text(const std::string& text) {
  const std::vector<std::string> parts = unpack(text);
  PYDIST_CHECK(parts.size() == 4);
  Roster roster;
  roster.token = parts[0];
  roster.secret_folder = parts[1];
  std::vector<std::string> hosts;
  for (Row& row : unpack_rows(parts[2])) {
    PYDIST_CHECK(row.size() == 4);
    hosts.push_back(std::move(row[0]));
    roster.ranks.push_back(
        {std::move(row[1]), static_cast<pid_t>(std::stol(row[2])), number_of_bytes(row[3])});
  }
  roster.placement = Placement(hosts);
  roster.host = HostRoster::from_text(parts[3]);
  return roster;
}

Roster hand_out(KeyValueStore& store, const std::string& topic,
                const std::vector<Introduction>& introductions, const std::string& secret_folder) {
  Roster roster;
  roster.token = introductions[0].token;
  roster.secret_folder = secret_folder;
  std::vector<std::string> identities;
  for (const Introduction& each : introductions) {
    identities.push_back(each.card.host_identity);
    roster.ranks.push_back({each.card.host_name, each.card.pid, each.card.page_number});
  }
  roster.placement = Placement(identities);
  const std::set<std::string> roomy = roomy_machines(introductions);
  for (int host = 0; host < roster.placement.hosts(); ++host) {
    HostRoster its;
    std::vector<ProcessorGrant> grants;
    for (const int rank : roster.placement.ranks_on(host)) {
      const Card& card = its.cards.emplace_back(introductions[static_cast<std::size_t>(rank)].card);
      grants.push_back({card.processors, card.processor_quota});
    }
    its.has_core_for_every_rank =
        roomy.contains(its.cards.front().machine) && has_core_for_every_rank(grants);
    if (roster.placement.spans_hosts()) {
      store.set(host_key(topic, host), its.to_text());
    } else {
      roster.host = std::move(its);
    }
  }
  return roster;
}

HostRoster roster_of_host(KeyValueStore& store, const std::string& topic, const Roster& roster,
                          int host, Deadline deadline) {
  return roster.placement.spans_hosts()
             ? HostRoster::from_text(store.get(host_key(topic, host), deadline))
             : roster.host;
}

NetworkRoster NetworkRoster::of(const std::vector<std::string>& introductions,
                                const KnownProcesses& processes, const std::string& name) {
  NetworkRoster roster;
  for (const std::string& text : introductions) {
    NetworkIntroduction each = NetworkIntroduction::from_text(text);
    if (!each.complaint.empty()) {
      const KnownProcess& its = processes[roster.cards.size()];
      throw TransportError(
          join(its.who(), " can't be reached by other hosts, so it can't take part ", "in group '",
               name, "': ", each.complaint, on_numbers(processes)),
          its.blame(each.complaint));
    }
    if (roster.cards.empty()) {
      roster.secret = each.secret;
    }
    roster.cards.push_back(std::move(each.card));
  }
  return roster;
}

std::string NetworkRoster::to_text() const {
  std::vector<Row> rows;
  for (const NodeCard& card : cards) {
    rows.push_back({card.machine, bytes_of_hex(card.name), pack(card.addresses)});
  }
  return pack({secret, pack_rows(rows)});
}

NetworkRoster NetworkRoster::from_text(const std::string& text) {
  const std::vector<std::string> parts = unpack(text);
  PYDIST_CHECK(parts.size() == 2);
  NetworkRoster roster{parts[0], {}};
  for (Row& row : unpack_rows(parts[1])) {
    PYDIST_CHECK(row.size() == 3);
    roster.cards.push_back({hex_of_bytes(row[1]), std::move(row[0]), unpack(row[2])});
  }
  return roster;
}

}  // namespace pydist
