// The symmetric heap as communicators hand it out.

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <span>

#include "collective_case.h"
#include "ranks.h"

namespace pydist::testing {
namespace {

constexpr Device kHost{};

std::span<float> floats_of(const MemoryPtr& memory) {
  return {static_cast<float*>(memory->data()), memory->bytes() / sizeof(float)};
}

Operation all_reduce_in_place(std::span<float> values) {
  Operation operation;
  operation.kind = OpKind::kAllReduce;
  operation.inputs.push_back({values.data(), values.size(), DType::kFloat32});
  operation.outputs = operation.inputs;
  return operation;
}

// Whether the block works: every rank's elements are its own, and add up.
void expect_usable(Communicator& group, const MemoryPtr& memory) {
  const std::span<float> values = floats_of(memory);
  std::fill(values.begin(), values.end(), static_cast<float>(group.rank() + 1));
  group.run(all_reduce_in_place(values));
  const auto sum = static_cast<float>(group.size() * (group.size() + 1) / 2);
  EXPECT_TRUE(std::all_of(values.begin(), values.end(), [sum](float x) { return x == sum; }));
}

TEST(NativeMemoryTest, IsSymmetricAndAligned) {
  for (const int size : {1, 2, 3}) {
    run_ranks(size, [](RankOfTest& self) {
      for (const std::size_t bytes : {4, 52, 4096, 3'000'000}) {
        const MemoryPtr memory = self.communicator->allocate(bytes, kHost);
        EXPECT_TRUE(memory->is_symmetric());
        EXPECT_EQ(memory->bytes(), bytes);
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory->data()) % 64, 0U);
        expect_usable(*self.communicator, memory);
      }
    });
  }
}

TEST(NativeMemoryTest, IsReusedOnceEveryRankFreedIt) {
  run_ranks(3, [](RankOfTest& self) {
    Communicator& group = *self.communicator;
    MemoryPtr first = group.allocate(1000, kHost);
    const void* const place = first->data();
    MemoryPtr kept = self.rank == 2 ? first : nullptr;
    first.reset();
    group.run(barrier());
    // Rank 2 still has it.
    MemoryPtr second = group.allocate(1000, kHost);
    EXPECT_NE(second->data(), place);
    if (kept) {
      std::memset(kept->data(), 1, kept->bytes());
    }
    expect_usable(group, second);
    kept.reset();
    group.run(barrier());
    const MemoryPtr third = group.allocate(1000, kHost);
    EXPECT_EQ(third->data(), place);
    expect_usable(group, third);
  });
}

TEST(NativeMemoryTest, GrowsAndStaysInPlace) {
  run_ranks(2, [](RankOfTest& self) {
    Communicator& group = *self.communicator;
    std::vector<MemoryPtr> blocks;
    for (std::size_t i = 0; i < 40; ++i) {
      blocks.push_back(group.allocate((i % 7 + 1) * 100'000, kHost));
      const std::span<float> values = floats_of(blocks.back());
      std::fill(values.begin(), values.end(), static_cast<float>(i + 1));
    }
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const std::span<float> values = floats_of(blocks[i]);
      group.run(all_reduce_in_place(values));
      const auto sum = 2 * static_cast<float>(i + 1);
      EXPECT_TRUE(std::all_of(values.begin(), values.end(), [sum](float x) { return x == sum; }))
          << "block " << i;
    }
  });
}

// On several hosts each has a heap of its own, in which other memory is free.
class NativeMemoryOnHosts : public ::testing::TestWithParam<HostsOfRanks> {
 protected:
  void run(const RankFunction& function) const {
    run_ranks(static_cast<int>(GetParam().size()), function, test_environment(), GetParam());
  }
};

TEST_P(NativeMemoryOnHosts, RandomLifetimes) {
  run([](RankOfTest& self) {
    Communicator& group = *self.communicator;
    std::vector<MemoryPtr> blocks(12);
    std::uint64_t chance = 5;  // the same on every rank
    for (int turn = 0; turn < 120; ++turn) {
      chance = mix(chance);
      MemoryPtr& block = blocks[chance % blocks.size()];
      block.reset();
      block = group.allocate(4 * ((chance >> 8) % 60'000), kHost);
      const std::span<float> values = floats_of(block);
      std::fill(values.begin(), values.end(), static_cast<float>(self.rank));
      // Nobody's new block overlaps with what anybody still has.
      const MemoryPtr& other = blocks[(chance >> 32) % blocks.size()];
      if (other) {
        expect_usable(group, other);
      }
    }
  });
}

// A rank tells all hosts of an allocation itself, but others may pass on the post that comes next,
// and what goes ahead of that.
TEST_P(NativeMemoryOnHosts, PostsThatTakeDifferentWaysDoNotMeet) {
  run([](RankOfTest& self) {
    const auto ranks = static_cast<float>(GetParam().size());
    for (int turn = 0; turn < 500; ++turn) {
      const MemoryPtr block = self.communicator->allocate(64, kHost);
      // It goes ahead of the post, and is so long that others are heard between the two.
      std::vector<float> values(7'000, 1.0F);
      self.communicator->run(all_reduce(values));
      ASSERT_EQ(values.back(), ranks);
    }
  });
}

// A host from which memory was taken back needs it anew, and others do not, or have other blocks
// free: rank 0 keeps what all others have freed.
TEST_P(NativeMemoryOnHosts, HostsThatNeedMemoryAndHostsThatHaveItAgree) {
  run([](RankOfTest& self) {
    Communicator& group = *self.communicator;
    for (int turn = 0; turn < 3; ++turn) {
      MemoryPtr first = group.allocate(3'000'000, kHost);
      const MemoryPtr kept = self.rank == 0 ? first : nullptr;
      first.reset();
      group.trim();
      const MemoryPtr second = group.allocate(2'000'000, kHost);
      const MemoryPtr third = group.allocate(500'000, kHost);
      expect_usable(group, second);
      expect_usable(group, third);
      const ErrorDescription error =
          error_of([&] { static_cast<void>(group.allocate(std::size_t{1} << 50, kHost)); });
      EXPECT_EQ(error.kind, ErrorKind::kTransport) << error.message;
      EXPECT_EQ(group.failure(), nullptr);
      expect_usable(group, second);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Hosts, NativeMemoryOnHosts,
                         ::testing::Values(HostsOfRanks{0, 0, 0}, HostsOfRanks{0, 1, 1},
                                           HostsOfRanks{0, 1, 0, 1, 2}));

TEST(NativeMemoryTest, ZeroBytes) {
  run_ranks(2, [](RankOfTest& self) {
    const MemoryPtr nothing = self.communicator->allocate(0, kHost);
    const MemoryPtr more_nothing = self.communicator->allocate(0, kHost);
    EXPECT_EQ(nothing->bytes(), 0U);
    expect_usable(*self.communicator, nothing);
    expect_usable(*self.communicator, more_nothing);
  });
}

TEST(NativeMemoryTest, OutlivesItsCommunicator) {
  run_ranks(2, [](RankOfTest& self) {
    CommunicatorPtr group = self.communicator->split({0, 1});
    MemoryPtr memory = group->allocate(100'000, kHost);
    group->shutdown();
    EXPECT_EQ(error_of([&] { static_cast<void>(group->allocate(4, kHost)); }).kind,
              ErrorKind::kInvalidUsage);
    group.reset();
    std::memset(memory->data(), 7, memory->bytes());
    // In another group it is memory like any other.
    std::fill(floats_of(memory).begin(), floats_of(memory).end(), 1.0F);
    expect_usable(*self.communicator, memory);
    memory.reset();
  });
}

TEST(NativeMemoryTest, DifferentSizesAreAMismatch) {
  const auto errors = collect_errors(3, [](RankOfTest& self) {
    static_cast<void>(self.communicator->allocate(self.rank == 1 ? 2000 : 1000, kHost));
  });
  for (const auto& error : errors) {
    ASSERT_NE(error, nullptr);
    EXPECT_EQ(describe(error).kind, ErrorKind::kMismatch) << describe(error).message;
    EXPECT_PRED2(contains, describe(error).message, "allocate(1000 bytes");
    EXPECT_PRED2(contains, describe(error).message, "allocate(2000 bytes");
  }
}

TEST(NativeMemoryTest, NoRoomIsAnErrorOnAllRanksAndTheGroupGoesOn) {
  for (const int size : {1, 3}) {
    run_ranks(size, [](RankOfTest& self) {
      Communicator& group = *self.communicator;
      for (const std::size_t bytes :
           {std::size_t{1} << 40, std::size_t{1} << 50, std::size_t{1} << 62,
            std::numeric_limits<std::size_t>::max() - 5000,
            std::numeric_limits<std::size_t>::max()}) {
        const ErrorDescription error =
            error_of([&] { static_cast<void>(group.allocate(bytes, kHost)); });
        EXPECT_EQ(error.kind, ErrorKind::kTransport) << error.message;
        EXPECT_EQ(group.failure(), nullptr);
        expect_usable(group, group.allocate(2'000'000, kHost));
      }
    });
  }
}

TEST(NativeMemoryTest, OtherDevicesAreRefused) {
  run_ranks(1, [](RankOfTest& self) {
    EXPECT_EQ(error_of([&] {
                static_cast<void>(self.communicator->allocate(4, Device{DeviceType::kCuda, 0}));
              }).kind,
              ErrorKind::kInvalidUsage);
  });
}

}  // namespace
}  // namespace pydist::testing
