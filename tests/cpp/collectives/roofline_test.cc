// The roofline of every kind: what all ranks together leave behind is the collective's result, so
// nothing that the collective can't do without was left out.

#include "collectives/roofline.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/error.h"

namespace pydist {
namespace {

constexpr int kRanks = 3;

using Elements = std::vector<float>;

float value(int rank, std::size_t index) {
  return static_cast<float>(100 * rank) + static_cast<float>(index);
}

std::vector<std::byte*> addresses(std::vector<Elements>& buffers) {
  std::vector<std::byte*> result;
  for (Elements& buffer : buffers) {
    result.push_back(reinterpret_cast<std::byte*>(buffer.data()));
  }
  return result;
}

struct BuffersOfRanks {
  std::vector<Elements> inputs;
  std::vector<Elements> outputs;
};

// Runs every rank's share, one after the other.
BuffersOfRanks run_all(OpKind kind, std::size_t count, std::size_t input, std::size_t output,
                       int root = 1) {
  BuffersOfRanks buffers;
  for (int rank = 0; rank < kRanks; ++rank) {
    buffers.inputs.emplace_back();
    for (std::size_t i = 0; i < input; ++i) {
      buffers.inputs.back().push_back(value(rank, i));
    }
    buffers.outputs.emplace_back(output, -1.0F);
  }
  Roofline::Case all;
  all.kind = kind;
  all.root = root;
  all.count = count;
  all.inputs = addresses(buffers.inputs);
  all.outputs = addresses(buffers.outputs);
  for (all.rank = 0; all.rank < kRanks; ++all.rank) {
    Roofline(all).run();
  }
  return buffers;
}

// 37: neither a multiple of the ranks nor of a cache line.
class RooflineTest : public ::testing::TestWithParam<std::size_t> {};

TEST_P(RooflineTest, AllReduceAndReduce) {
  const std::size_t count = GetParam();
  const BuffersOfRanks all = run_all(OpKind::kAllReduce, count, count, count);
  const BuffersOfRanks one = run_all(OpKind::kReduce, count, count, count);
  for (std::size_t i = 0; i < count; ++i) {
    const float sum = value(0, i) + value(1, i) + value(2, i);
    for (const Elements& output : all.outputs) {
      ASSERT_EQ(output[i], sum);
    }
    ASSERT_EQ(one.outputs[1][i], sum);
    ASSERT_EQ(one.outputs[0][i], -1.0F);
    ASSERT_EQ(one.outputs[2][i], -1.0F);
  }
}

TEST_P(RooflineTest, ReduceScatter) {
  const std::size_t count = GetParam();
  const BuffersOfRanks all = run_all(OpKind::kReduceScatter, count, kRanks * count, count);
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t at = rank * count + i;
      ASSERT_EQ(all.outputs[rank][i], value(0, at) + value(1, at) + value(2, at));
    }
  }
}

TEST_P(RooflineTest, AllGatherAndGather) {
  const std::size_t count = GetParam();
  const BuffersOfRanks all = run_all(OpKind::kAllGather, count, count, kRanks * count);
  const BuffersOfRanks one = run_all(OpKind::kGather, count, count, kRanks * count);
  for (int rank = 0; rank < kRanks; ++rank) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t at = static_cast<std::size_t>(rank) * count + i;
      for (const Elements& output : all.outputs) {
        ASSERT_EQ(output[at], value(rank, i));
      }
      ASSERT_EQ(one.outputs[1][at], value(rank, i));
      ASSERT_EQ(one.outputs[0][at], -1.0F);
    }
  }
}

TEST_P(RooflineTest, BroadcastAndScatter) {
  const std::size_t count = GetParam();
  const BuffersOfRanks all = run_all(OpKind::kBroadcast, count, count, count);
  const BuffersOfRanks parts = run_all(OpKind::kScatter, count, kRanks * count, count);
  for (std::size_t i = 0; i < count; ++i) {
    ASSERT_EQ(all.outputs[0][i], value(1, i));
    ASSERT_EQ(all.outputs[2][i], value(1, i));
    for (std::size_t rank = 0; rank < kRanks; ++rank) {
      ASSERT_EQ(parts.outputs[rank][i], value(1, rank * count + i));
    }
  }
}

TEST_P(RooflineTest, AllToAllAndSend) {
  const std::size_t count = GetParam();
  const BuffersOfRanks all = run_all(OpKind::kAllToAll, count, kRanks * count, kRanks * count);
  const BuffersOfRanks next = run_all(OpKind::kSend, count, count, count);
  for (std::size_t rank = 0; rank < kRanks; ++rank) {
    for (std::size_t i = 0; i < count; ++i) {
      for (int peer = 0; peer < kRanks; ++peer) {
        ASSERT_EQ(all.outputs[rank][static_cast<std::size_t>(peer) * count + i],
                  value(peer, rank * count + i));
      }
      ASSERT_EQ(next.outputs[rank][i], value((static_cast<int>(rank) + 2) % kRanks, i));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Counts, RooflineTest, ::testing::Values(0, 1, 37, 5000));

TEST(Roofline, NeedsABufferOfEveryRank) {
  Roofline::Case all;
  EXPECT_THROW(Roofline{all}, InvalidUsage);
  float element = 0;
  all.inputs = {reinterpret_cast<std::byte*>(&element)};
  EXPECT_THROW(Roofline{all}, InvalidUsage);
  all.outputs = all.inputs;
  all.rank = 1;
  EXPECT_THROW(Roofline{all}, InvalidUsage);
  all.rank = 0;
  Roofline(all).run();  // a barrier moves nothing
  EXPECT_EQ(element, 0);
}

}  // namespace
}  // namespace pydist
