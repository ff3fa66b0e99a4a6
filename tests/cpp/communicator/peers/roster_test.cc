#include "communicator/peers/roster.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "health/known_processes.h"
#include "memory/job_secret.h"
#include "memory_store.h"
#include "topology/rendezvous.h"

namespace pydist {
namespace {

using std::chrono::seconds;
using testing::MemoryStore;

constexpr const char* kTopic = "group/introduction";

// Of ranks that are dealt out to `hosts` hosts in turn, each bound to a core of its own.
std::vector<Introduction> introductions_of(int size, int hosts) {
  std::vector<Introduction> all;
  for (int rank = 0; rank < size; ++rank) {
    const int host = rank % hosts;
    Introduction each;
    each.card.address = join("pydist-", random_token());
    each.card.host_identity =
        join("boot:8b8a1e0e-3f5f-4d3e-9a60-5d7d3a0f8f11 net:[4026531840] ", host);
    each.card.host_name = join("node-", host);
    each.card.machine = each.card.host_identity;
    each.card.pid = 100'000 + rank * 37;
    each.card.pid_namespace = "pid:[4026531836]";
    each.card.page_number = std::hash<std::string>()(each.card.address);
    each.card.memory_limits = "cgroup:[4026531835]\n/user.slice\n";
    for (int core = 0; core < 64; ++core) {
      each.card.processors.push_back(rank * 64 + core);
    }
    each.settings = "alike";
    if (rank == 0) {
      each.token = random_token();
    }
    all.push_back(std::move(each));
  }
  return all;
}

NodeCard node_card_of(int rank) {
  return {random_token(),
          join("machine ", rank / 3),
          {join("10.0.0.", rank % 256, " port ", 40'000 + rank), "fd00::1 port 40000"}};
}

TEST(RosterTest, OnOneHostItHasAllCards) {
  MemoryStore store;
  const std::vector<Introduction> introductions = introductions_of(5, 1);
  const Roster roster =
      Roster::from_text(hand_out(store, kTopic, introductions, "/run/user/0/pydist").to_text());
  EXPECT_EQ(roster.token, introductions[0].token);
  EXPECT_EQ(roster.secret_folder, "/run/user/0/pydist");
  EXPECT_FALSE(roster.placement.spans_hosts());
  const std::vector<Card> cards =
      roster_of_host(store, kTopic, roster, 0, Deadline::in(seconds(0))).cards;
  ASSERT_EQ(cards.size(), introductions.size());
  for (std::size_t rank = 0; rank < cards.size(); ++rank) {
    EXPECT_EQ(cards[rank].to_text(), introductions[rank].card.to_text());
  }
  EXPECT_EQ(store.requests(), 0U);
}

TEST(RosterTest, EachHostReadsTheCardsOfItsRanks) {
  MemoryStore store;
  const std::vector<Introduction> introductions = introductions_of(7, 3);
  const Roster roster = Roster::from_text(hand_out(store, kTopic, introductions).to_text());
  ASSERT_EQ(roster.placement.size(), 7);
  ASSERT_EQ(roster.placement.hosts(), 3);
  ASSERT_EQ(roster.ranks.size(), introductions.size());
  EXPECT_TRUE(roster.host.cards.empty());
  for (int rank = 0; rank < 7; ++rank) {
    const Card& card = introductions[static_cast<std::size_t>(rank)].card;
    const Acquaintance& known = roster.ranks[static_cast<std::size_t>(rank)];
    EXPECT_EQ(known.host_name, card.host_name);
    EXPECT_EQ(known.pid, card.pid);
    EXPECT_EQ(known.page_number, card.page_number);
    const int host = roster.placement.host_of(rank);
    EXPECT_EQ(host, rank % 3);
    const std::vector<Card> cards =
        roster_of_host(store, kTopic, roster, host, Deadline::in(seconds(0))).cards;
    ASSERT_EQ(cards.size(), roster.placement.ranks_on(host).size());
    EXPECT_EQ(cards[static_cast<std::size_t>(roster.placement.index_on_host(rank))].to_text(),
              card.to_text());
  }
}

// Of three hosts, as each of them reads it; `change` says what is unlike introductions_of().
std::vector<bool> rooms(const std::function<void(int host, Card& card)>& change) {
  MemoryStore store;
  std::vector<Introduction> introductions = introductions_of(6, 3);
  for (int rank = 0; rank < 6; ++rank) {
    change(rank % 3, introductions[static_cast<std::size_t>(rank)].card);
  }
  const Roster roster = Roster::from_text(hand_out(store, kTopic, introductions).to_text());
  std::vector<bool> has_room;
  for (int host = 0; host < 3; ++host) {
    has_room.push_back(roster_of_host(store, kTopic, roster, host, Deadline::in(seconds(0)))
                           .has_core_for_every_rank);
  }
  return has_room;
}

TEST(RosterTest, RanksOfOneMachineShareItsCoresWhateverHostTheyAreOn) {
  const std::vector<int> four{0, 1, 2, 3};
  EXPECT_EQ(rooms([](int, Card&) {}), std::vector<bool>(3, true));
  // Each host has enough for its two. Only where two of them are one machine, that has not.
  EXPECT_EQ(rooms([&](int, Card& card) { card.processors = {0, 1}; }), std::vector<bool>(3, true));
  const auto shared = [&](const std::vector<int>& processors) {
    return rooms([&](int host, Card& card) {
      card.processors = processors;
      card.machine = host == 1 ? "another" : "the same";
    });
  };
  EXPECT_EQ(shared({0, 1}), std::vector<bool>({false, true, false}));
  EXPECT_EQ(shared(four), std::vector<bool>(3, true));
  // Each container has a quota of its own.
  EXPECT_EQ(rooms([&](int host, Card& card) {
              card.processors = four;
              card.machine = host == 1 ? "another" : "the same";
              card.processor_quota = host == 0 ? 1.0 : 2.0;
            }),
            std::vector<bool>({false, true, true}));
  // Where the kernel does not tell.
  EXPECT_EQ(rooms([&](int, Card& card) {
              card.processors = {0, 1};
              card.machine = "";
            }),
            std::vector<bool>(3, true));
}

TEST(RosterTest, AnEntryTakesTensOfBytes) {
  constexpr std::size_t kSize = 1024;
  MemoryStore store;
  const std::vector<Introduction> introductions = introductions_of(kSize, 128);
  const std::size_t whole = introductions[kSize - 1].to_text().size();
  EXPECT_GT(whole, 400U);
  EXPECT_LT(hand_out(store, kTopic, introductions).to_text().size(), 32 * kSize);
  NetworkRoster network;
  for (std::size_t rank = 0; rank < kSize; ++rank) {
    network.cards.push_back(node_card_of(static_cast<int>(rank)));
  }
  // Neighbours that share no host differ in their addresses, too.
  EXPECT_LT(network.to_text().size(), 64 * kSize);
}

TEST(RosterTest, TheNetworkRosterComesBack) {
  NetworkRoster roster;
  roster.secret = random_token();
  for (int rank = 0; rank < 5; ++rank) {
    roster.cards.push_back(node_card_of(rank));
  }
  const NetworkRoster read = NetworkRoster::from_text(roster.to_text());
  EXPECT_EQ(read.secret, roster.secret);
  ASSERT_EQ(read.cards.size(), roster.cards.size());
  for (std::size_t rank = 0; rank < read.cards.size(); ++rank) {
    EXPECT_EQ(read.cards[rank].name, roster.cards[rank].name);
    EXPECT_EQ(read.cards[rank].machine, roster.cards[rank].machine);
    EXPECT_EQ(read.cards[rank].addresses, roster.cards[rank].addresses);
  }
}

TEST(RosterTest, WhoSpeaksAnotherLanguageIsNamed) {
  std::vector<std::string> texts;
  for (const Introduction& each : introductions_of(3, 1)) {
    texts.push_back(each.to_text());
  }
  texts[2] = pack({"an introduction", "of another version"});
  KnownProcesses processes = strangers(3);
  try {
    static_cast<void>(read_introductions(texts, processes, "world"));
    FAIL();
  } catch (const Mismatch& error) {
    EXPECT_NE(std::string(error.what()).find("different versions of pydist"), std::string::npos)
        << error.what();
    EXPECT_EQ(error.blame().ranks, std::vector<int>{2});
  }
}

TEST(RosterTest, WhoCannotBeReachedIsNamed) {
  NetworkIntroduction first;
  first.card = node_card_of(0);
  NetworkIntroduction second;
  second.complaint = "there is no interface eth7";
  KnownProcesses processes = strangers(2);
  try {
    static_cast<void>(NetworkRoster::of({first.to_text(), second.to_text()}, processes, "world"));
    FAIL();
  } catch (const TransportError& error) {
    EXPECT_NE(std::string(error.what()).find("there is no interface eth7"), std::string::npos)
        << error.what();
    EXPECT_EQ(error.blame().ranks, std::vector<int>{1});
  }
}

TEST(RosterTest, TornTextsAreRefused) {
  MemoryStore store;
  const std::string whole = hand_out(store, kTopic, introductions_of(3, 1)).to_text();
  for (const std::size_t length : {std::size_t{3}, whole.size() / 2, whole.size() - 1}) {
    EXPECT_THROW(static_cast<void>(Roster::from_text(whole.substr(0, length))), std::exception)
        << length;
  }
}

}  // namespace
}  // namespace pydist
