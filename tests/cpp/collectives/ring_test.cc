// The ring over channels of any number of slots and any window, its ranks driven by one thread in
// orders drawn at random: all of them end, and in the right sums.

#include "collectives/ring.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "collectives/any_order.h"
#include "memory/symmetric_heap.h"
#include "transport/shm_channel.h"

namespace pydist {
namespace {

constexpr std::size_t kSlotBytes = 64;
constexpr std::size_t kSlotFloats = kSlotBytes / sizeof(float);

struct RingShape {
  int size;
  std::size_t slots;
  std::size_t window;
};

std::size_t place(int rank) { return static_cast<std::size_t>(rank); }

// The channel from one rank to the next.
struct RingRoad {
  explicit RingRoad(const RingShape& shape)
      : slots(kSlotBytes * shape.slots),
        lengths(shape.slots),
        memory{slots.data(), kSlotBytes,     shape.slots, &sent,
               &released,    lengths.data(), shape.window} {}

  std::vector<std::byte> slots;
  std::vector<std::uint32_t> lengths;
  Counter sent{0};
  Counter released{0};
  ShmChannelMemory memory;
};

class RingOfRanks {
 public:
  explicit RingOfRanks(const RingShape& shape) : size_(shape.size), bells_(place(shape.size)) {
    const GroupSegment segment(
        SharedSegment::create("ring", GroupSegment::bytes(size_, kSlotBytes)), size_, kSlotBytes);
    std::vector<Doorbell*> bells;
    for (int rank = 0; rank < size_; ++rank) {
      segment.reserve_control(rank);
      bells.push_back(&bells_[place(rank)]);
      roads_.push_back(std::make_unique<RingRoad>(shape));
    }
    for (int rank = 0; rank < size_; ++rank) {
      heaps_.push_back(std::make_unique<SymmetricHeap>(rank, size_, SharedFile::create("heap"),
                                                       std::vector<std::string>(place(size_))));
      groups_.push_back(std::make_unique<Group>(rank, size_, segment, bells, *heaps_.back()));
      const int next = (rank + 1) % size_;
      const int previous = (rank + size_ - 1) % size_;
      senders_.emplace_back(roads_[place(rank)]->memory, next, bells_[place(next)]);
      receivers_.emplace_back(roads_[place(previous)]->memory, previous, bells_[place(previous)]);
    }
  }

  // Runs one collective, in which any rank that can moves next. Returns false where all wait.
  [[nodiscard]] bool run(const std::vector<Call>& calls, std::mt19937& random) {
    std::vector<std::unique_ptr<Execution>> ranks;
    for (int rank = 0; rank < size_; ++rank) {
      Group& group = *groups_[place(rank)];
      group.begin();
      ranks.push_back(std::make_unique<Execution>(
          run_ring(group, calls[place(rank)], senders_[place(rank)], receivers_[place(rank)],
                   senders_[place(rank)].slot_bytes())));
    }
    return end_in_any_order(ranks, random);
  }

 private:
  const int size_;
  std::vector<Doorbell> bells_;
  std::vector<std::unique_ptr<RingRoad>> roads_;
  std::vector<std::unique_ptr<SymmetricHeap>> heaps_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<ShmSendChannel> senders_;
  std::vector<ShmReceiveChannel> receivers_;
};

// A rank's buffers, of whole numbers: their sums are exact in any order.
struct RingBuffers {
  std::vector<float> input;
  std::vector<float> output;
  std::vector<Buffer> inputs;
  std::vector<Buffer> outputs;
};

float element(int rank, std::size_t index) {
  return static_cast<float>((place(rank) * 31 + index * 7) % 101);
}

struct RingCase {
  OpKind kind;
  std::size_t sent;      // elements of a rank's input
  std::size_t received;  // and of its output
  bool is_in_place = false;
};

std::vector<Call> calls_of(const RingCase& what, std::vector<RingBuffers>& buffers) {
  const int size = static_cast<int>(buffers.size());
  std::vector<Call> calls;
  for (int rank = 0; rank < size; ++rank) {
    RingBuffers& own = buffers[place(rank)];
    for (std::size_t index = 0; index < what.sent; ++index) {
      own.input.push_back(element(rank, index));
    }
    own.output.assign(what.received, -1.0F);
    own.inputs = {{own.input.data(), what.sent}};
    own.outputs = {{(what.is_in_place ? own.input : own.output).data(), what.received}};
    // One block, or one for each rank.
    const int sent = what.kind == OpKind::kReduceScatter ? size : 1;
    const int received = what.kind == OpKind::kAllGather ? size : 1;
    calls.push_back({what.kind, DType::kFloat32, DType::kFloat32, ReduceOp::kSum, 0, 1.0,
                     Blocks(own.inputs, sent), Blocks(own.outputs, received),
                     what.kind == OpKind::kReduceScatter ? what.received : what.sent});
  }
  return calls;
}

float expected_of(const RingCase& what, int size, int rank, std::size_t index) {
  if (what.kind == OpKind::kAllGather) {
    return element(static_cast<int>(index / what.sent), index % what.sent);
  }
  const std::size_t offset = what.kind == OpKind::kReduceScatter ? place(rank) * what.received : 0;
  float sum = 0.0F;
  for (int other = 0; other < size; ++other) {
    sum += element(other, offset + index);
  }
  return sum;
}

class RingTest : public ::testing::TestWithParam<RingShape> {};

TEST_P(RingTest, EndsInTheSumsWhateverTheOrder) {
  const int size = GetParam().size;
  const std::size_t ranks = place(size);
  RingOfRanks ring(GetParam());
  std::mt19937 random(7);
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, ranks * kSlotFloats,
                                  ranks * kSlotFloats * 2 + 1, ranks * kSlotFloats * 7 + 5}) {
    for (int repeat = 0; repeat < 8; ++repeat) {
      for (const RingCase& what : {RingCase{OpKind::kAllReduce, count, count, repeat % 2 == 0},
                                   RingCase{OpKind::kReduceScatter, count * ranks, count},
                                   RingCase{OpKind::kAllGather, count, count * ranks}}) {
        std::vector<RingBuffers> buffers(ranks);
        ASSERT_TRUE(ring.run(calls_of(what, buffers), random)) << "the ranks wait in a circle";
        for (int rank = 0; rank < size; ++rank) {
          const auto* result = static_cast<const float*>(buffers[place(rank)].outputs[0].data);
          for (std::size_t index = 0; index < what.received; ++index) {
            ASSERT_EQ(result[index], expected_of(what, size, rank, index))
                << "rank " << rank << ", element " << index;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Windows, RingTest,
                         ::testing::Values(RingShape{2, 2, 1}, RingShape{2, 4, 3},
                                           RingShape{3, 2, 1}, RingShape{3, 3, 2},
                                           RingShape{4, 4, 1}, RingShape{4, 5, 4},
                                           RingShape{5, 3, 2}, RingShape{7, 9, 8}),
                         [](const auto& info) {
                           return join("p", info.param.size, "_slots", info.param.slots, "_window",
                                       info.param.window);
                         });

// So the bound that the channel's interface states is what it must be.
TEST(RingWindowTest, RanksWaitInACircleWhereTheWindowIsAllSlots) {
  const RingCase what{OpKind::kAllReduce, 3 * kSlotFloats * 2, 3 * kSlotFloats * 2};
  RingOfRanks ring({3, 2, 2});
  std::vector<RingBuffers> buffers(3);
  std::mt19937 random(7);
  EXPECT_FALSE(ring.run(calls_of(what, buffers), random));
}

}  // namespace
}  // namespace pydist
