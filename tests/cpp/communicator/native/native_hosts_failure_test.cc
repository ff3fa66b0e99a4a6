// Groups of several hosts that fail amid what they send, and links that other groups use meanwhile.

#include <gtest/gtest.h>

#include <sys/mman.h>

#include <chrono>
#include <future>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "communicator/peers/endpoint.h"
#include "ranks.h"
#include "transport/tcp/raw_peer.h"

namespace pydist::testing {
namespace {

// Keeps the process of a rank from reading what comes over the network, from the first frame of
// `kBlockedGroup` on.
constexpr std::uint64_t kBlockedGroup = 0xb10c;

class Blockade final : public FrameSink {
 public:
  std::byte* place(const FrameHeader&, std::uint64_t) override { return nullptr; }
  void take(const FrameHeader&, const std::byte*, std::uint64_t) override {
    begun.set_value();
    end.get_future().wait();
  }
  void lose(std::uint64_t) override {}

  std::promise<void> begun;
  std::promise<void> end;
};

// Memory that nobody can read once it is gone: a system call that does fails.
class Pages {
 public:
  explicit Pages(std::size_t bytes)
      : bytes_(bytes),
        data_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {}
  ~Pages() { ::munmap(data_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  [[nodiscard]] void* data() const { return data_; }

 private:
  std::size_t bytes_;
  void* data_;
};

// What waits in a link refers to the caller's buffers, which are the caller's again once the
// operation has failed, whoever has found out that it has.
TEST(NativeHostsFailureTest, BuffersOfAFailedOperationAreNotReadAgain) {
  constexpr std::size_t kCount = 100'000;
  for (const int who_fails : {1, 3}) {
    Blockade blockade;
    std::promise<NodeCard> far_card;
    std::promise<void> is_blocked;
    const std::shared_future<void> all_go = is_blocked.get_future().share();
    std::latch have_submitted(4);
    std::promise<void> has_failed;
    std::promise<void> is_flushed;
    Environment environment = test_environment();
    environment.network.sockets = 1;
    const auto errors = collect_errors(
        4,
        [&](RankOfTest& self) {
          const std::shared_ptr<TcpNode> node = self.endpoint->network();
          LinkPtr link;
          if (self.rank == 2) {
            node->add_sink(kBlockedGroup, blockade);
            far_card.set_value(node->card());
          } else if (self.rank == 0) {
            link = node->link_to(far_card.get_future().get(), "", JobSecret(""), nullptr);
            FrameHeader header;
            header.kind = FrameKind::kEager;
            header.group = kBlockedGroup;
            link->send(header);
            blockade.begun.get_future().wait();
            header.group = kBlockedGroup + 1;
            link->send(header, std::vector<std::byte>(std::size_t{16} << 20));
            is_blocked.set_value();
          }
          all_go.wait();
          std::vector<std::vector<float>> values(4, std::vector<float>(kCount));
          auto own = std::make_unique<Pages>(kCount * sizeof(float));
          Operation operation;
          operation.kind = OpKind::kAllGather;
          operation.inputs = {Buffer{own->data(), kCount, DType::kFloat32}};
          operation.outputs = {buffer_of(values[0]), buffer_of(values[1]), buffer_of(values[2]),
                               buffer_of(values[3])};
          const WorkPtr work = self.communicator->submit(operation);
          have_submitted.count_down();
          if (self.rank == who_fails) {
            have_submitted.wait();
            // Rank 0 has most likely sent its block by then, to a link that is stuck.
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            self.communicator->abort(Aborted("enough"));
          } else if (self.rank == 2) {
            has_failed.get_future().wait();
            blockade.end.set_value();
          }
          EXPECT_THROW(work->wait(), Aborted);
          own = nullptr;
          if (self.rank == 0) {
            has_failed.set_value();
            EXPECT_TRUE(eventually([&] { return !link->has_to_send(); }));
            EXPECT_FALSE(link->is_lost());
            is_flushed.set_value();
          } else if (self.rank == 2) {
            is_flushed.get_future().wait();
            node->remove_sink(kBlockedGroup);
          }
        },
        environment, {0, 0, 1, 1});
    for (const std::exception_ptr& error : errors) {
      EXPECT_EQ(error, nullptr);
    }
  }
}

TEST(NativeHostsFailureTest, ALongErrorIsToldOnEveryHost) {
  const std::string reason(100'000, 'x');
  const auto errors = collect_errors(3,
                                     [&](RankOfTest& self) {
                                       if (self.rank == 0) {
                                         self.communicator->abort(Aborted("enough: " + reason));
                                         return;
                                       }
                                       std::vector<float> values(3);
                                       self.communicator->run(all_reduce(values));
                                     },
                                     test_environment(), {0, 1, 1});
  for (const int rank : {1, 2}) {
    const ErrorDescription error = describe(errors[static_cast<std::size_t>(rank)]);
    EXPECT_EQ(error.kind, ErrorKind::kAborted) << error.message.substr(0, 200);
    EXPECT_TRUE(contains(error.message, "enough: xxx")) << error.message.substr(0, 200);
  }
}

Environment in_rounds() {
  Environment environment = test_environment();
  environment.rounds_from = 2;
  environment.timeout = std::chrono::milliseconds(1'500);
  return environment;
}

// Most ranks wait for one that waits itself, for what that was to pass on.
TEST(NativeHostsFailureTest, WhoDoesNotComeIsNamedByAllInRounds) {
  for (const HostsOfRanks& hosts : {HostsOfRanks{0, 1, 2, 3, 4, 5}, HostsOfRanks{0, 0, 1, 1, 1, 2},
                                    HostsOfRanks{0, 0, 1, 1, 2, 3}}) {
    for (const std::size_t count : {1, 30'000}) {
      constexpr int kLate = 3;
      std::latch have_failed(5);
      const auto errors = collect_errors(
          6,
          [&](RankOfTest& self) {
            std::vector<float> values(count);
            self.communicator->run(all_reduce(values));
            if (self.rank == kLate) {
              have_failed.wait();
            }
            try {
              self.communicator->run(all_reduce(values));
            } catch (...) {
              if (self.rank != kLate) {
                have_failed.count_down();
              }
              throw;
            }
          },
          in_rounds(), hosts);
      for (const std::exception_ptr& each : errors) {
        ASSERT_NE(each, nullptr);
        const ErrorDescription error = describe(each);
        EXPECT_EQ(error.kind, ErrorKind::kTimeout) << error.message;
        EXPECT_EQ(error.blame.ranks, std::vector<int>{kLate}) << error.message;
        EXPECT_TRUE(contains(error.message, "rank 3 ")) << error.message;
      }
    }
  }
}

// The last collective is over for some ranks before others have heard all of it.
TEST(NativeHostsFailureTest, WhoIsDoneMayLeaveWhileOthersStillPassOn) {
  for (const HostsOfRanks& hosts :
       {HostsOfRanks{0, 0, 1, 1, 2, 2, 3, 3, 4, 4}, HostsOfRanks{0, 0, 0, 1, 1, 2, 3}}) {
    for (int round = 0; round < 5; ++round) {
      const int late = round % static_cast<int>(hosts.size());
      run_ranks(
          static_cast<int>(hosts.size()),
          [&](RankOfTest& self) {
            if (self.rank == late) {
              std::this_thread::sleep_for(std::chrono::milliseconds(50));
            }
            std::vector<float> values(3, 1.0F);
            self.communicator->run(all_reduce(values));
            EXPECT_EQ(values[0], static_cast<float>(hosts.size()));
            self.communicator->shutdown();
          },
          in_rounds(), hosts);
    }
  }
}

TEST(NativeHostsFailureTest, WhoHasLeftIsNamedByAllInRounds) {
  for (const HostsOfRanks& hosts : {HostsOfRanks{0, 1, 2, 3, 4}, HostsOfRanks{0, 1, 2, 3}}) {
    for (const std::size_t count : {1, 30'000}) {
      const auto errors = collect_errors(
          static_cast<int>(hosts.size()),
          [&](RankOfTest& self) {
            std::vector<float> values(count);
            self.communicator->run(all_reduce(values));
            if (self.rank == 1) {
              return;
            }
            self.communicator->run(all_reduce(values));
          },
          in_rounds(), hosts);
      for (std::size_t rank = 0; rank < errors.size(); ++rank) {
        if (rank == 1) {
          EXPECT_EQ(errors[rank], nullptr);
          continue;
        }
        ASSERT_NE(errors[rank], nullptr);
        const ErrorDescription error = describe(errors[rank]);
        EXPECT_EQ(error.kind, ErrorKind::kPeerLost) << error.message;
        EXPECT_EQ(error.blame.ranks, std::vector<int>{1}) << error.message;
      }
    }
  }
}

TEST(NativeHostsFailureTest, DifferentCallsInRoundsAreNamedByAll) {
  for (const int other : {0, 3}) {
    const auto errors = collect_errors(5,
                                       [&](RankOfTest& self) {
                                         std::vector<float> values(self.rank == other ? 4 : 20'000);
                                         self.communicator->run(all_reduce(values));
                                       },
                                       in_rounds(), {0, 1, 2, 3, 4});
    for (const std::exception_ptr& each : errors) {
      ASSERT_NE(each, nullptr);
      const ErrorDescription error = describe(each);
      EXPECT_EQ(error.kind, ErrorKind::kMismatch) << error.message;
      EXPECT_TRUE(contains(error.message, join("rank ", other))) << error.message;
    }
  }
}

// A group is split off, and meets, while its parent goes on over the same links.
TEST(NativeHostsFailureTest, GroupsMeetWhileOthersAreAtWork) {
  run_ranks(4,
            [](RankOfTest& self) {
              const CommunicatorPtr busy = self.communicator->split({0, 1, 2, 3});
              std::vector<int> rounds{0};
              std::thread working([&] {
                for (bool goes_on = true; goes_on;) {
                  std::vector<int> values(5'000, 1);
                  busy->run(all_reduce(values));
                  ASSERT_EQ(values, std::vector<int>(5'000, 4));
                  ++rounds[0];
                  // As many rounds on every rank.
                  std::vector<int> is_over{rounds[0] >= 200 ? 1 : 0};
                  busy->run(all_reduce(is_over));
                  goes_on = is_over[0] == 0;
                }
              });
              for (int round = 0; round < 5; ++round) {
                const CommunicatorPtr group = self.communicator->split({3, 2, 1, 0});
                std::vector<int> values(100, self.rank);
                group->run(all_reduce(values));
                EXPECT_EQ(values[99], 6);
              }
              working.join();
            },
            test_environment(), {0, 0, 1, 1});
}

}  // namespace
}  // namespace pydist::testing
