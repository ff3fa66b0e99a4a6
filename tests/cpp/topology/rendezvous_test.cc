#include "topology/rendezvous.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <vector>

#include "base/error.h"
#include "memory_store.h"
#include "threads_as_ranks.h"

namespace pydist {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::MemoryStore;
using testing::run_ranks;

// Texts that a careless format would trip over.
std::string text_of(int rank) {
  switch (rank % 5) {
    case 0:
      return "";
    case 1:
      return "3:abc";
    case 2:
      return std::string("zero\0byte", 9);
    case 3:
      return "missing";
    default:
      return std::string(100'000, static_cast<char>('a' + rank % 26));
  }
}

std::string all_of(const std::vector<std::string>& said) { return pack(said); }

TEST(RendezvousTest, EverybodyHearsWhatRankZeroMakesOfAllInRankOrder) {
  for (const int size : {1, 2, 3, 8, 33}) {
    MemoryStore store;
    std::vector<std::string> expected;
    for (int rank = 0; rank < size; ++rank) {
      expected.push_back(text_of(rank));
    }
    run_ranks(size, [&](int rank) {
      EXPECT_EQ(unpack(exchange(store, "topic", rank, size, text_of(rank), all_of,
                                Deadline::in(seconds(30)))),
                expected);
    });
  }
}

TEST(RendezvousTest, RequestsGrowWithTheSizeNotItsSquare) {
  constexpr int kSize = 32;
  MemoryStore store;
  run_ranks(kSize, [&](int rank) {
    static_cast<void>(
        exchange(store, "topic", rank, kSize, "x", all_of, Deadline::in(seconds(30))));
  });
  EXPECT_LE(store.requests(), 5u * kSize);
  // What the ranks said is gone; only the answer stays.
  EXPECT_LE(store.size(), 2u);
}

TEST(RendezvousTest, AWorldOfOneNeedsNoStore) {
  MemoryStore store;
  EXPECT_EQ(exchange(store, "alone", 0, 1, "me", all_of, Deadline::never()), pack({"me"}));
  EXPECT_EQ(store.requests(), 0u);
}

TEST(RendezvousTest, TopicsDoNotMix) {
  MemoryStore store;
  run_ranks(3, [&](int rank) {
    for (int round = 0; round < 20; ++round) {
      const std::string all = exchange(store, join("round ", round), rank, 3,
                                       join(rank, "@", round), all_of, Deadline::in(seconds(30)));
      EXPECT_EQ(unpack(all)[2], join("2@", round));
    }
  });
}

TEST(RendezvousTest, EverybodyNamesTheMissing) {
  constexpr int kSize = 6;
  MemoryStore store;
  std::atomic<int> complaints{0};
  run_ranks(kSize, [&](int rank) {
    if (rank == 2 || rank == 5) {
      return;
    }
    try {
      static_cast<void>(
          exchange(store, "start", rank, kSize, "here", all_of, Deadline::in(milliseconds(200))));
      ADD_FAILURE() << "rank " << rank << " met ranks that never came";
    } catch (const Timeout& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find(": 2, 5."), std::string::npos) << text;
      EXPECT_NE(text.find("start"), std::string::npos) << text;
      EXPECT_EQ(error.blame().ranks, (std::vector<int>{2, 5}));
      ++complaints;
    }
  });
  EXPECT_EQ(complaints.load(), 4);
}

// Rank 0 has to say who is missing before the others lose their patience with it.
TEST(RendezvousTest, ManyMissingRanksCostOneDeadline) {
  MemoryStore store;
  const auto before = Deadline::Clock::now();
  EXPECT_THROW(static_cast<void>(
                   exchange(store, "lonely", 0, 1024, "", all_of, Deadline::in(milliseconds(200)))),
               Timeout);
  EXPECT_LT(Deadline::Clock::now() - before, seconds(3));
}

TEST(RendezvousTest, WhatRankZeroFindsWrongAllThrow) {
  MemoryStore store;
  const Summarize refuse = [](const std::vector<std::string>& said) -> std::string {
    throw Mismatch(join("rank 1 says ", said[1]), Blame{.ranks = {1}});
  };
  run_ranks(4, [&](int rank) {
    try {
      static_cast<void>(exchange(store, "topic", rank, 4, join("word ", rank), refuse,
                                 Deadline::in(seconds(30))));
      FAIL() << "rank " << rank;
    } catch (const Mismatch& error) {
      EXPECT_STREQ(error.what(), "rank 1 says word 1");
      EXPECT_EQ(error.blame().ranks, std::vector<int>{1});
    }
  });
}

TEST(RendezvousTest, ARankThatDeclinesIsNotWaitedFor) {
  MemoryStore store;
  const auto before = Deadline::Clock::now();
  decline(store, "topic", {ErrorKind::kAborted, "rank 2 gave up", Blame{.ranks = {2}}});
  run_ranks(2, [&](int rank) {
    try {
      static_cast<void>(exchange(store, "topic", rank, 3, "", all_of, Deadline::in(seconds(30))));
      FAIL() << "rank " << rank;
    } catch (const Aborted& error) {
      EXPECT_STREQ(error.what(), "rank 2 gave up");
      EXPECT_EQ(error.blame().ranks, std::vector<int>{2});
    }
  });
  EXPECT_LT(Deadline::Clock::now() - before, seconds(10));
}

TEST(RendezvousTest, WhomARankHasLostIsNamedToTheOthers) {
  for (const int finder : {0, 1}) {
    MemoryStore store;
    run_ranks(3, [&](int rank) {
      const CheckHopeOf hope = [rank, finder](int awaited) {
        EXPECT_EQ(awaited == 0, rank != 0);
        if (rank == finder) {
          throw PeerLost("rank 3 has died before the group was made.", Blame{.ranks = {3}});
        }
      };
      try {
        static_cast<void>(
            exchange(store, "topic", rank, 4, "", all_of, Deadline::in(seconds(30)), hope));
        FAIL() << "rank " << rank;
      } catch (const PeerLost& error) {
        EXPECT_NE(std::string(error.what()).find("rank 3 has died"), std::string::npos);
        EXPECT_EQ(error.blame().ranks, std::vector<int>{3});
      }
    });
  }
}

TEST(RendezvousTest, AnInterruptedRankIsNamedToTheOthers) {
  struct Interruption {};
  MemoryStore store;
  run_ranks(3, [&](int rank) {
    const CheckHopeOf hope = [rank](int) {
      if (rank == 1) {
        throw Interruption();
      }
    };
    try {
      static_cast<void>(
          exchange(store, "topic", rank, 4, "", all_of, Deadline::in(seconds(30)), hope));
      FAIL() << "rank " << rank;
    } catch (const Aborted& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1 was interrupted"), std::string::npos);
      EXPECT_EQ(error.blame().ranks, std::vector<int>{1});
      EXPECT_NE(rank, 1);
    } catch (const Interruption&) {
      EXPECT_EQ(rank, 1);
    }
  });
}

TEST(RendezvousTest, AFaultInTheSummaryIsNoInterruption) {
  const std::vector<Summarize> faults = {
      [](const auto&) -> std::string {
        PYDIST_CHECK(false);
        return "";
      },
      [](const auto&) { return std::to_string(std::stoull("none")); },
  };
  for (const Summarize& fault : faults) {
    MemoryStore store;
    run_ranks(3, [&](int rank) {
      try {
        static_cast<void>(exchange(store, "topic", rank, 3, "", fault, Deadline::in(seconds(30))));
        FAIL() << "rank " << rank;
      } catch (const Error& error) {
        EXPECT_EQ(std::string(error.what()).find("interrupted"), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find("rank 0"), std::string::npos) << error.what();
        EXPECT_EQ(error.blame().ranks, std::vector<int>{0});
      }
    });
  }
}

TEST(RendezvousTest, ARank0ThatComesTooLateLearnsIt) {
  MemoryStore store;
  const Deadline deadline = Deadline::in(milliseconds(100));
  // Rank 1 would wait on for what rank 0 has to say.
  const CheckHopeOf stopped = [&](int) {
    if (deadline.has_passed()) {
      throw Timeout("rank 0 is stopped");
    }
  };
  EXPECT_THROW(static_cast<void>(exchange(store, "topic", 1, 2, "", all_of, deadline, stopped)),
               Timeout);
  try {
    static_cast<void>(exchange(store, "topic", 0, 2, "", all_of, Deadline::in(seconds(30))));
    FAIL();
  } catch (const Timeout& error) {
    EXPECT_EQ(error.blame().ranks, std::vector<int>{0});
  }
}

TEST(RendezvousTest, PackedTextsComeBack) {
  const std::vector<std::vector<std::string>> lists = {
      {}, {""}, {"", "", ""}, {"12:"}, {":"}, {text_of(4), text_of(2), text_of(1)}};
  for (const auto& list : lists) {
    EXPECT_EQ(unpack(pack(list)), list);
  }
  EXPECT_EQ(unpack(pack({pack({"a", "b"}), "c"})), (std::vector<std::string>{"1:a1:b", "c"}));
}

TEST(RendezvousTest, TornTextsAreRefused) {
  const std::string whole = pack({"first", "second"});
  for (const std::size_t length : {3u, 8u, 9u, 12u}) {
    EXPECT_THROW(static_cast<void>(unpack(whole.substr(0, length))), std::exception) << length;
  }
  for (const char* const text : {"no number:x", "1 number:x", "0x1:x", "+1:x", " 1:x", ":x"}) {
    EXPECT_THROW(static_cast<void>(unpack(text)), std::exception) << text;
  }
}

}  // namespace
}  // namespace pydist
