// How NCCL groups are made of others: by a split where all ranks of the parent come, otherwise
// anew. On an NCCL and a CUDA driver without a GPU (tests/fakes).

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "../fakes/nccl.h"
#include "communicator/nccl/nccl_communicator.h"
#include "communicator/nccl/nccl_group.h"
#include "nccl_fakes.h"
#include "ranks.h"

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;

TEST(NcclSplit, IsWhereAllRanksOfTheParentCome) {
  use_fake_cuda();
  const int before = ::fake_nccl_communicators_split();
  run_ranks(2, [&](RankOfTest& self) {
    const NcclRank rank(self);
    std::vector<float> values(10, 1.0F);
    const WorkPtr first = rank.group->submit(rank.all_reduce(values));
    const CommunicatorPtr same = rank.group->split({0, 1});
    EXPECT_TRUE(first->is_completed()) << "NCCL splits nothing that is at work";
    rank.group->run(barrier());
    EXPECT_EQ(::fake_nccl_communicators_split(), before + 2);
    const CommunicatorPtr turned = rank.group->split({1, 0});
    const CommunicatorPtr alone = rank.group->split({self.rank});
    rank.group->run(barrier());
    EXPECT_EQ(::fake_nccl_communicators_split(), before + 2);
    EXPECT_EQ(turned->rank(), 1 - self.rank);
    for (const CommunicatorPtr& each : {same, turned, alone}) {
      EXPECT_GE(each->capabilities().device_bytes, NcclGroup::kScratchBytes);
      each->submit(rank.all_reduce(values))->wait();
    }
    EXPECT_EQ(values[0], 8.0F);
    alone->shutdown();
    turned->shutdown();
    // Nothing is shared: the parent's end is not the child's.
    rank.group->shutdown();
    same->submit(rank.all_reduce(values))->wait();
    EXPECT_EQ(values[0], 16.0F);
    same->shutdown();
  });
  EXPECT_EQ(::fake_nccl_faults(), 0);
}

// Nor is a failure.
TEST(NcclSplit, OutlivesTheParentsFailure) {
  use_fake_cuda();
  run_ranks(2, [](RankOfTest& self) {
    const NcclRank rank(self);
    const CommunicatorPtr other = rank.group->split({0, 1});
    const CommunicatorPtr child = other->split({0, 1});
    std::vector<float> values(10, 1.0F);
    other->abort(Aborted("enough"));
    EXPECT_TRUE(comes_true([&] { return other->failure() != nullptr; }));
    child->submit(rank.all_reduce(values))->wait();
    EXPECT_EQ(values[0], 2.0F);
    EXPECT_EQ(error_of([&] { static_cast<void>(other->split({0, 1})); }).message, "enough");
    child->shutdown();
    other->shutdown();
    rank.group->shutdown();
  });
}

// On one rank the operation that the other has launched comes from another thread, while it splits.
TEST(NcclSplit, HoldsNoLaunchUp) {
  use_fake_cuda();
  run_ranks(2, [](RankOfTest& self) {
    const NcclRank rank(self);
    std::vector<float> values(10, 1.0F);
    const auto reduce = [&] { return rank.group->submit(rank.all_reduce(values)); };
    const WorkPtr early = self.rank == 1 ? reduce() : nullptr;
    std::thread late([&] {
      if (self.rank == 0) {
        std::this_thread::sleep_for(milliseconds(200));
        reduce()->wait();
      }
    });
    const CommunicatorPtr child = rank.group->split({0, 1});
    late.join();
    if (early != nullptr) {
      early->wait();
    }
    child->submit(rank.all_reduce(values))->wait();
    EXPECT_EQ(values[0], 4.0F);
    child->shutdown();
    rank.group->shutdown();
  });
  EXPECT_EQ(::fake_nccl_faults(), 0);
}

// And one that is at work for longer than a split waits is not split.
TEST(NcclSplit, IsNotOfAGroupThatIsAtWork) {
  use_fake_cuda();
  const int before = ::fake_nccl_communicators_split();
  run_ranks(2, [](RankOfTest& self) {
    const NcclRank rank(self);
    std::vector<float> values(10, 1.0F);
    const WorkPtr early = self.rank == 1 ? rank.group->submit(rank.all_reduce(values)) : nullptr;
    const CommunicatorPtr child = rank.group->split({0, 1});
    (early != nullptr ? early : rank.group->submit(rank.all_reduce(values)))->wait();
    child->submit(rank.all_reduce(values))->wait();
    EXPECT_EQ(values[0], 4.0F);
    child->shutdown();
    rank.group->shutdown();
  });
  EXPECT_EQ(::fake_nccl_communicators_split(), before);
}

// A group of the host takes nothing of the device.
TEST(NcclSplit, IsOfTheHostAloneWhereThatIsAskedFor) {
  use_fake_cuda();
  run_ranks(2, [](RankOfTest& self) {
    const NcclRank rank(self);
    rank.group->run(barrier());
    const int before = ::fake_nccl_communicators();
    const CommunicatorPtr host = rank.group->split_on_host({0, 1});
    std::vector<float> values(10, 1.0F);
    host->run(all_reduce(values));
    EXPECT_EQ(values[0], 2.0F);
    EXPECT_EQ(::fake_nccl_communicators(), before);
    EXPECT_EQ(host->capabilities().device_bytes, 0U);
    host->shutdown();
    rank.group->run(barrier());
    rank.group->shutdown();
  });
}

// The one that waits in a split hears that the other does not come.
TEST(NcclSplit, NamesTheRankThatDoesNotCome) {
  use_fake_cuda();
  const Environment environment = with_timeout_of(milliseconds(1'500));
  const auto body = [&](RankOfTest& self) {
    const NcclRank rank(self, environment);
    rank.group->run(barrier());
    if (self.rank == 1) {
      rank.group->shutdown();
      return;
    }
    const auto [kind, message, blame] =
        error_of([&] { static_cast<void>(rank.group->split({0, 1})); });
    EXPECT_EQ(kind, ErrorKind::kPeerLost) << message;
    EXPECT_EQ(blame.ranks, std::vector<int>{1});
    rank.group->shutdown();
  };
  run_ranks(2, body, environment);
}

// What every rank gets of a split that one of them breaks off.
std::vector<ErrorDescription> errors_of_split(const char* faults, milliseconds timeout) {
  use_fake_cuda();
  const FakeFault fault(faults);
  const Environment environment = with_timeout_of(timeout);
  std::vector<ErrorDescription> errors(2);
  const auto body = [&](RankOfTest& self) {
    const NcclRank rank(self, environment);
    rank.group->run(barrier());
    ErrorDescription& error = errors[static_cast<std::size_t>(self.rank)];
    error = error_of([&] { static_cast<void>(rank.group->split({0, 1})); });
    // The parent is in the middle of something, for good.
    std::vector<float> values(10, 1.0F);
    const std::string later =
        error_of([&] { rank.group->submit(rank.all_reduce(values))->wait(); }).message;
    EXPECT_TRUE(contains(later, "splitting off the group")) << later;
    rank.group->shutdown();
  };
  run_ranks(2, body, environment);
  return errors;
}

// NCCL refuses on one rank, while the other waits for it within the split.
TEST(NcclSplit, IsBrokenOffOnAllRanksWhereOneCannot) {
  for (const ErrorDescription& error : errors_of_split("split_fail:1:0", milliseconds(20'000))) {
    EXPECT_EQ(error.kind, ErrorKind::kTransport) << error.message;
    EXPECT_TRUE(contains(error.message, "splitting off the group")) << error.message;
    EXPECT_EQ(error.blame.ranks, std::vector<int>{1}) << error.message;
  }
}

// NCCL itself never ends it.
TEST(NcclSplit, EndsWithItsTime) {
  for (const ErrorDescription& error : errors_of_split("split_hang:1:0", milliseconds(1'500))) {
    EXPECT_TRUE(contains(error.message, "timed out: splitting off the group")) << error.message;
  }
}

}  // namespace
}  // namespace pydist::testing
