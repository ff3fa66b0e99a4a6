#include "communicator/peers/roster.h"

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "memory/sha256.h"
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

std::string cards_key(const std::string& topic, int host) {
  return join(topic, "/cards of host ", host);
}

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

}  // namespace

std::string Roster::to_text() const {
  std::vector<Row> rows;
  for (const Acquaintance& each : ranks) {
    rows.push_back({std::to_string(placement.host_of(static_cast<int>(rows.size()))),
                    each.host_name, std::to_string(each.pid), bytes_of_number(each.page_number)});
  }
  return pack({token, secret_folder, pack_rows(rows), pack_cards(cards)});
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
  roster.cards = unpack_cards(parts[3]);
  return roster;
}

Roster hand_out(KeyValueStore& store, const std::string& topic,
                const std::vector<Introduction>& introductions) {
  Roster roster;
  roster.token = introductions[0].token;
  roster.secret_folder = introductions[0].secret_folder;
  std::vector<std::string> identities;
  for (const Introduction& each : introductions) {
    identities.push_back(each.card.host_identity);
    roster.ranks.push_back({each.card.host_name, each.card.pid, each.card.page_number});
  }
  roster.placement = Placement(identities);
  for (int host = 0; host < roster.placement.hosts(); ++host) {
    std::vector<Card> cards;
    for (const int rank : roster.placement.ranks_on(host)) {
      cards.push_back(introductions[static_cast<std::size_t>(rank)].card);
    }
    if (roster.placement.spans_hosts()) {
      store.set(cards_key(topic, host), pack_cards(cards));
    } else {
      roster.cards = std::move(cards);
    }
  }
  return roster;
}

std::vector<Card> cards_on(KeyValueStore& store, const std::string& topic, const Roster& roster,
                           int host, Deadline deadline) {
  return roster.placement.spans_hosts() ? unpack_cards(store.get(cards_key(topic, host), deadline))
                                        : roster.cards;
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
