#include "c10d/gloo/gloo_control.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "health/text_field.h"
#include "ranks.h"
#include "transport/tcp/raw_peer.h"

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

Environment control_environment() {
  Environment environment = test_environment();
  environment.job_secret = "known to all";
  return environment;
}

// The ranks of a group, each as a process of its own.
class ControlledRanks {
 public:
  explicit ControlledRanks(int size, const Environment& environment = control_environment()) {
    for (int rank = 0; rank < size; ++rank) {
      add(environment);
    }
  }

  void add(const Environment& environment) {
    nodes_.push_back(std::make_shared<GlooNode>(
        environment.network, GlooNode::Place{.interfaces = {}, .address = "127.0.0.1"}));
    controls_.push_back(std::make_unique<GlooControl>(environment, nodes_.back()));
    cards.push_back(controls_.back()->card(1));
  }

  // Calls `function` for each rank on a thread of its own.
  void on_all(const std::function<void(GlooControl&, int rank)>& function) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < static_cast<int>(controls_.size()); ++rank) {
      threads.emplace_back([&, rank] { function(at(rank), rank); });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
  void connect() {
    on_all([this](GlooControl& control, int rank) {
      control.connect(rank, cards, Deadline::in(seconds(20)));
    });
  }

  [[nodiscard]] GlooControl& at(int rank) { return *controls_[static_cast<std::size_t>(rank)]; }
  // The process ends.
  void end(int rank) {
    controls_[static_cast<std::size_t>(rank)] = nullptr;
    nodes_[static_cast<std::size_t>(rank)] = nullptr;
  }

  std::vector<GlooControl::Card> cards;

 private:
  std::vector<std::shared_ptr<GlooNode>> nodes_;
  std::vector<std::unique_ptr<GlooControl>> controls_;
};

void gather_one(GlooControl& control, Deadline deadline = Deadline::in(seconds(20))) {
  std::vector<char> all(64);
  control.all_gather("x", all.data(), 1, deadline);
}

class GlooControlOfRanks : public ::testing::TestWithParam<int> {};

TEST_P(GlooControlOfRanks, GathersWhatEachHasSaid) {
  for (const int spin_us : {0, 50}) {
    Environment environment = control_environment();
    environment.spin = std::chrono::microseconds(spin_us);
    const int size = GetParam();
    ControlledRanks ranks(size, environment);
    ranks.connect();
    ranks.on_all([size](GlooControl& control, int rank) {
      for (const std::size_t bytes : {1, 40, 0, 10'000, 8, 8, 8}) {
        const std::string mine(bytes, static_cast<char>('a' + rank));
        std::string all(bytes * static_cast<std::size_t>(size), '.');
        control.all_gather(mine.data(), all.data(), bytes, Deadline::in(seconds(20)));
        std::string expected;
        for (int other = 0; other < size; ++other) {
          expected += std::string(bytes, static_cast<char>('a' + other));
        }
        EXPECT_EQ(all, expected) << rank;
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, GlooControlOfRanks, ::testing::Values(2, 3, 4, 5, 7, 8),
                         ::testing::PrintToStringParamName());

TEST(GlooControlTest, ARankMayBeOneAheadButWaitsForTheNext) {
  ControlledRanks ranks(3);
  ranks.connect();
  std::atomic<int> done{0};
  ranks.on_all([&](GlooControl& control, int rank) {
    if (rank == 0) {
      std::this_thread::sleep_for(milliseconds(50));
      EXPECT_EQ(done.load(), 0);
    }
    gather_one(control);
    ++done;
    gather_one(control);
  });
}

TEST(GlooControlTest, ASilentRankIsNamedAtTheDeadline) {
  ControlledRanks ranks(2);
  ranks.connect();
  const ErrorDescription error =
      error_of([&] { gather_one(ranks.at(0), Deadline::in(milliseconds(50))); });
  EXPECT_EQ(error.kind, ErrorKind::kTimeout);
  EXPECT_TRUE(contains(error.message, "rank 1")) << error.message;
}

TEST(GlooControlTest, ClosingEndsTheWaitsOfAll) {
  for (const int spin_us : {0, 1'000'000}) {
    Environment environment = control_environment();
    environment.spin = std::chrono::microseconds(spin_us);
    ControlledRanks ranks(3, environment);
    ranks.connect();
    ranks.on_all([&](GlooControl& control, int rank) {
      if (rank == 2) {
        std::this_thread::sleep_for(milliseconds(20));
        control.close();
        control.close();
      }
      const ErrorDescription error = error_of([&] { gather_one(control); });
      EXPECT_EQ(error.kind, rank == 2 ? ErrorKind::kAborted : ErrorKind::kPeerLost)
          << error.message;
    });
  }
}

TEST(GlooControlTest, WhoWaitsForAProcessThatEndsLearnsOfIt) {
  ControlledRanks ranks(2);
  ranks.connect();
  std::thread ending([&] { ranks.end(1); });
  const ErrorDescription error = error_of([&] { gather_one(ranks.at(0)); });
  ending.join();
  EXPECT_EQ(error.kind, ErrorKind::kPeerLost) << error.message;
  EXPECT_TRUE(contains(error.message, "rank 1")) << error.message;
}

TEST(GlooControlTest, WhatARankHasSaidBeforeItsEndCounts) {
  ControlledRanks ranks(2);
  ranks.connect();
  std::thread other([&] {
    gather_one(ranks.at(1));
    ranks.end(1);
  });
  gather_one(ranks.at(0));
  other.join();
}

TEST(GlooControlTest, RanksWithOtherSecretsDoNotConnect) {
  Environment other = control_environment();
  other.job_secret = "known to one";
  ControlledRanks ranks(1);
  ranks.add(other);
  ranks.on_all([&](GlooControl& control, int rank) {
    const ErrorDescription error =
        error_of([&] { control.connect(rank, ranks.cards, Deadline::in(milliseconds(300))); });
    EXPECT_EQ(error.kind, ErrorKind::kTransport) << error.message;
  });
}

// The system has given it no port, say.
TEST(GlooControlTest, ARankWithoutAnAddressIsNamedByTheOthers) {
  for (const bool has_secret : {true, false}) {
    for (const std::size_t without : {0, 2}) {
      ControlledRanks ranks(3, has_secret ? control_environment() : test_environment());
      ranks.cards[without] = {};
      ranks.on_all([&](GlooControl& control, int rank) {
        const ErrorDescription error =
            error_of([&] { control.connect(rank, ranks.cards, Deadline::in(seconds(20))); });
        EXPECT_EQ(error.kind, ErrorKind::kTransport);
        EXPECT_TRUE(contains(error.message, join("rank ", without))) << error.message;
      });
    }
  }
}

TEST(GlooControlTest, WithoutASecretOfTheEnvironmentRankZeroMakesOne) {
  ControlledRanks ranks(3, test_environment());
  ranks.connect();
  ranks.on_all([](GlooControl& control, int) { gather_one(control); });
}

// A rank of another group, or a broken one, in the place of rank 1.
TEST(GlooControlTest, FramesThatMakeNoSenseEndTheConnection) {
  const std::vector<std::function<void(FrameHeader&)>> damages = {
      [](FrameHeader& header) { header.sender = 0; },
      [](FrameHeader& header) { header.sender = -1; },
      [](FrameHeader& header) { header.sender = 2; },
      [](FrameHeader& header) { header.receiver = 1; },
      [](FrameHeader& header) { header.number = 0; },
      [](FrameHeader& header) { header.number = 64 * 3; },
      [](FrameHeader& header) { header.number = UINT64_MAX; },
      [](FrameHeader& header) { header.kind = FrameKind::kPost; },
      [](FrameHeader& header) { header.kind = FrameKind::kEager; },
      [](FrameHeader& header) { header.kind = FrameKind::kClosed; },
  };
  for (const auto& damage : damages) {
    ControlledRanks ranks(1);
    const std::string name = random_token();
    ranks.cards.push_back(ranks.cards[0]);
    write_text(ranks.cards[1].address, NodeCard{name, "", {"127.0.0.1 port 9"}}.to_text());
    const std::string token = read_text(ranks.cards[0].token);
    FileDescriptor connection;
    std::thread other([&] {
      const NodeCard card = NodeCard::from_text(read_text(ranks.cards[0].address));
      ASSERT_TRUE(eventually([&] {
        connection = connect_as({token, name, card.name}, JobSecret("known to all").derive(token),
                                SocketAddress::from_text(card.addresses[0]));
        return static_cast<bool>(connection);
      }));
    });
    ranks.at(0).connect(0, ranks.cards, Deadline::in(seconds(20)));
    other.join();
    FrameHeader header;
    header.kind = FrameKind::kRecords;
    header.group = number_of_token(token);
    header.sender = 1;
    header.receiver = 0;
    header.number = 64;
    FrameHeader broken = header;
    damage(broken);
    ASSERT_TRUE(send_all(connection.get(), frame_text(broken, "x")));
    EXPECT_TRUE(is_closed_soon(connection.get()));
    EXPECT_EQ(error_of([&] { gather_one(ranks.at(0)); }).kind, ErrorKind::kPeerLost);
  }
}

}  // namespace
}  // namespace pydist::testing
