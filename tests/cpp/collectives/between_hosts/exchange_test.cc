// The collectives between hosts over channels of any window, their ranks driven by one thread in
// orders drawn at random: all of them end, and in the right values. Between hosts what is sent
// stays where it lies until a network, which moves when chance will have it, brings it to where its
// receiver expects it.

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "collectives/any_order.h"
#include "collectives/between_hosts/between_hosts.h"
#include "memory/symmetric_heap.h"
#include "transport/shm_channel.h"
#include "transport/tcp/segment_targets.h"

namespace pydist {
namespace {

// Ranks share the memory of a group here.
constexpr RoundsSettings kNoRounds{.from_hosts = 1 << 20, .most_bytes = 0};
constexpr std::size_t kLaneBytes = 256;
// Between ranks of a host one slot takes the parts of all hosts.
constexpr std::size_t kHostLaneBytes = 640;
// As collective_lanes() has it: a sender hears of every other slot that is free again.
constexpr std::size_t kReleaseEvery = 2;

struct ExchangeShape {
  std::vector<int> hosts;  // of each rank
  std::size_t window;

  [[nodiscard]] int size() const { return static_cast<int>(hosts.size()); }
};

std::size_t index_of(int rank) { return static_cast<std::size_t>(rank); }

Placement placement_of(const ExchangeShape& shape) {
  std::vector<std::string> identities;
  for (const int host : shape.hosts) {
    identities.push_back(std::to_string(host));
  }
  return Placement(identities);
}

// What a lane is at each end, and on the way.
struct ExchangeRoad {
  ExchangeRoad(std::size_t window, std::size_t slot_bytes)
      : slots(slot_bytes * count_of_slots(window)),
        lengths(count_of_slots(window)),
        memory{slots.data(), slot_bytes, lengths.size(), &sent, &released, lengths.data(), window},
        senders_slots(slots.size()) {}

  // As many as can be under way (Note [Segments ahead]) or released and not told of.
  static std::size_t count_of_slots(std::size_t window) {
    return 2 * window + 1 + kReleaseEvery - 1;
  }

  // Brings the next segment, which is read only now.
  void bring_one() {
    const std::span<const std::byte> segment = under_way.front();
    const std::uint64_t number = sent.load() + 1;
    std::byte* const expected = targets.place(number, segment.size());
    const std::size_t index = (number - 1) % lengths.size();
    std::memcpy(expected != nullptr ? expected : memory.slots + index * kLaneBytes, segment.data(),
                segment.size());
    places += expected != nullptr ? 1 : 0;
    lengths[index] = static_cast<std::uint32_t>(segment.size());
    under_way.pop_front();
    written.fetch_add(1);
    sent.store(number);
  }

  std::vector<std::byte> slots;
  std::vector<std::uint32_t> lengths;
  Counter sent{0};
  Counter released{0};
  Counter told{0};  // of those, between hosts
  ShmChannelMemory memory;
  // Between hosts.
  std::vector<std::byte> senders_slots;
  std::deque<std::span<const std::byte>> under_way;
  std::uint64_t given = 0;
  Counter written{0};
  SegmentTargets targets;
  std::size_t places = 0;  // segments that were brought to where they are expected
};

class FarSendChannel final : public SendChannel {
 public:
  FarSendChannel(ExchangeRoad& road, int peer) : road_(road), peer_(peer) {}

  [[nodiscard]] std::size_t slot_bytes() const noexcept override { return kLaneBytes; }
  [[nodiscard]] std::size_t window() const noexcept override { return road_.memory.window; }
  [[nodiscard]] Condition until_free() override {
    const std::uint64_t next = road_.given + 1;
    const std::size_t slots = road_.lengths.size();
    return next <= slots ? Condition() : Condition(road_.told, peer_, next - slots);
  }
  [[nodiscard]] std::byte* slot() override {
    return road_.senders_slots.data() + road_.given % road_.lengths.size() * kLaneBytes;
  }
  void send(std::size_t bytes) override { send_from(slot(), bytes); }
  void send_from(const std::byte* data, std::size_t bytes) override {
    road_.under_way.emplace_back(data, bytes);
    ++road_.given;
  }
  [[nodiscard]] Condition until_written() override { return {road_.written, peer_, road_.given}; }
  [[nodiscard]] Condition until_reusable() override { return until_written(); }

 private:
  ExchangeRoad& road_;
  const int peer_;
};

class FarReceiveChannel final : public ReceiveChannel {
 public:
  FarReceiveChannel(ExchangeRoad& road, int peer, Doorbell& bell)
      : road_(road), channel_(road.memory, peer, bell) {}

  [[nodiscard]] std::uint64_t released() const noexcept override { return channel_.released(); }
  void expect(std::uint64_t number, std::span<std::byte> target) override {
    road_.targets.expect(number, target);
  }
  [[nodiscard]] Condition until_received() override { return channel_.until_received(); }
  [[nodiscard]] std::span<const std::byte> slot() override {
    const std::byte* const place = road_.targets.place_of(released() + 1);
    const std::span<const std::byte> slot = channel_.slot();
    return place != nullptr ? std::span(place, slot.size()) : slot;
  }
  void release() override {
    channel_.release();
    road_.targets.forget_until(released());
    if (released() % kReleaseEvery == 0) {
      road_.told.store(released());
    }
  }

 private:
  ExchangeRoad& road_;
  ShmReceiveChannel channel_;
};

// Between every two ranks.
class Roads {
 public:
  explicit Roads(const ExchangeShape& shape) : size_(shape.size()), bells_(index_of(size_)) {
    for (const int sender : shape.hosts) {
      for (const int receiver : shape.hosts) {
        roads_.push_back(std::make_unique<ExchangeRoad>(
            shape.window, sender == receiver ? kHostLaneBytes : kLaneBytes));
      }
    }
  }
  [[nodiscard]] ExchangeRoad& road(int sender, int receiver) {
    return *roads_[index_of(sender * size_ + receiver)];
  }
  [[nodiscard]] Doorbell& bell(int rank) { return bells_[index_of(rank)]; }
  [[nodiscard]] const std::vector<std::unique_ptr<ExchangeRoad>>& all() const { return roads_; }

 private:
  const int size_;
  std::vector<Doorbell> bells_;
  std::vector<std::unique_ptr<ExchangeRoad>> roads_;
};

class ChannelsOfRank final : public Channels {
 public:
  ChannelsOfRank(int rank, const std::vector<int>& hosts, Roads& roads, std::size_t window)
      : window_(window) {
    for (int peer = 0; peer < static_cast<int>(hosts.size()); ++peer) {
      ExchangeRoad& there = roads.road(rank, peer);
      ExchangeRoad& back = roads.road(peer, rank);
      Doorbell& bell = roads.bell(peer);
      if (hosts[index_of(peer)] == hosts[index_of(rank)]) {
        senders_.push_back(std::make_unique<ShmSendChannel>(there.memory, peer, bell));
        receivers_.push_back(std::make_unique<ShmReceiveChannel>(back.memory, peer, bell));
      } else {
        senders_.push_back(std::make_unique<FarSendChannel>(there, peer));
        receivers_.push_back(std::make_unique<FarReceiveChannel>(back, peer, bell));
      }
    }
  }
  [[nodiscard]] std::size_t slot_bytes() const noexcept override { return kLaneBytes; }
  [[nodiscard]] std::size_t slot_bytes_on_host() const noexcept override { return kHostLaneBytes; }
  [[nodiscard]] std::size_t window() const noexcept override { return window_; }
  [[nodiscard]] SendChannel& to(int rank) override { return *senders_[index_of(rank)]; }
  [[nodiscard]] ReceiveChannel& from(int rank) override { return *receivers_[index_of(rank)]; }

 private:
  const std::size_t window_;
  std::vector<std::unique_ptr<SendChannel>> senders_;
  std::vector<std::unique_ptr<ReceiveChannel>> receivers_;
};

class ExchangingRanks {
 public:
  explicit ExchangingRanks(const ExchangeShape& shape)
      : size_(shape.size()), placement_(placement_of(shape)), roads_(shape) {
    const GroupSegment segment(
        SharedSegment::create("exchange", GroupSegment::bytes(size_, kLaneBytes)), size_,
        kLaneBytes);
    std::vector<Doorbell*> bells;
    for (int rank = 0; rank < size_; ++rank) {
      segment.reserve_control(rank);
      bells.push_back(&roads_.bell(rank));
    }
    for (int rank = 0; rank < size_; ++rank) {
      heaps_.push_back(std::make_unique<SymmetricHeap>(rank, size_, SharedFile::create("heap"),
                                                       std::vector<std::string>(index_of(size_))));
      groups_.push_back(std::make_unique<Group>(rank, size_, segment, bells, *heaps_.back()));
      channels_.push_back(
          std::make_unique<ChannelsOfRank>(rank, shape.hosts, roads_, shape.window));
    }
  }

  // Runs one collective, in which any rank that can moves next. Returns false where all wait.
  [[nodiscard]] bool run(const std::vector<Call>& calls, std::mt19937& random) {
    std::vector<std::unique_ptr<Execution>> ranks;
    for (int rank = 0; rank < size_; ++rank) {
      groups_[index_of(rank)]->begin();
      ranks.push_back(std::make_unique<Execution>(
          run_between_hosts(*groups_[index_of(rank)], calls[index_of(rank)],
                            *channels_[index_of(rank)], placement_, kNoRounds)));
    }
    return end_in_any_order(ranks, random, [this](std::mt19937& chance) {
      std::vector<ExchangeRoad*> busy;
      for (const auto& road : roads_.all()) {
        if (!road->under_way.empty()) {
          busy.push_back(road.get());
        }
      }
      if (!busy.empty()) {
        busy[chance() % busy.size()]->bring_one();
      }
      return !busy.empty();
    });
  }

  // How many segments have been brought to where they belong.
  [[nodiscard]] std::size_t places() const {
    std::size_t places = 0;
    for (const auto& road : roads_.all()) {
      places += road->places;
    }
    return places;
  }

 private:
  const int size_;
  const Placement placement_;
  Roads roads_;
  std::vector<std::unique_ptr<SymmetricHeap>> heaps_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<std::unique_ptr<ChannelsOfRank>> channels_;
};

// Of whole numbers: their sums are exact in any order.
float number(int rank, std::size_t index) {
  return static_cast<float>((index_of(rank) * 31 + index * 7) % 101);
}

struct ExchangedBuffers {
  std::vector<float> input;
  std::vector<float> output;
  std::vector<Buffer> inputs;
  std::vector<Buffer> outputs;
};

// `count` elements of a block, or of the buffer.
std::vector<Call> calls_on(OpKind kind, std::size_t count, int root, bool is_in_place,
                           std::vector<ExchangedBuffers>& buffers) {
  const int size = static_cast<int>(buffers.size());
  const bool sends_blocks = kind == OpKind::kReduceScatter || kind == OpKind::kAllToAll;
  const bool gets_blocks = kind == OpKind::kAllGather || kind == OpKind::kAllToAll;
  const std::size_t sent = count * (sends_blocks ? buffers.size() : 1);
  const std::size_t got = count * (gets_blocks ? buffers.size() : 1);
  std::vector<Call> calls;
  for (int rank = 0; rank < size; ++rank) {
    ExchangedBuffers& own = buffers[index_of(rank)];
    for (std::size_t index = 0; index < sent; ++index) {
      own.input.push_back(number(rank, index));
    }
    own.output.assign(got, -1.0F);
    own.inputs = {{own.input.data(), sent, DType::kFloat32}};
    own.outputs = {
        {(is_in_place && sent == got ? own.input : own.output).data(), got, DType::kFloat32}};
    if (kind == OpKind::kReduce && rank != root) {
      own.outputs.clear();
    }
    if (kind == OpKind::kBroadcast) {
      (rank == root ? own.outputs : own.inputs).clear();
    }
    calls.push_back({kind, DType::kFloat32, DType::kFloat32, ReduceOp::kSum, root, 1.0,
                     Blocks(own.inputs, sends_blocks ? size : 1),
                     Blocks(own.outputs, gets_blocks ? size : 1), count});
  }
  return calls;
}

float expected_at(const Call& call, int size, int rank, std::size_t index) {
  const OpKind kind = call.kind;
  const std::size_t count = call.count;
  const std::size_t mine = index_of(rank) * count;
  if (kind == OpKind::kBroadcast) {
    return number(call.root, index);
  }
  if (kind == OpKind::kAllGather) {
    return number(static_cast<int>(index / count), index % count);
  }
  if (kind == OpKind::kAllToAll) {
    return number(static_cast<int>(index / count), mine + index % count);
  }
  float sum = 0.0F;
  for (int other = 0; other < size; ++other) {
    sum += number(other, index + (kind == OpKind::kReduceScatter ? mine : 0));
  }
  return sum;
}

class ExchangeTest : public ::testing::TestWithParam<ExchangeShape> {};

TEST_P(ExchangeTest, EndsInTheRightValuesWhateverTheOrder) {
  const int size = GetParam().size();
  ExchangingRanks ranks(GetParam());
  std::mt19937 random(11);
  for (const std::size_t count : {0, 1, 70, 200, 997, 3001}) {
    for (int repeat = 0; repeat < 4; ++repeat) {
      for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather,
                                OpKind::kAllToAll, OpKind::kReduce, OpKind::kBroadcast}) {
        // Whole numbers, each exact in float32, and so are their sums.
        std::vector<ExchangedBuffers> buffers(index_of(size));
        const bool may_be_in_place =
            kind == OpKind::kAllToAll || (has_op(kind) && kind != OpKind::kReduceScatter);
        const bool is_in_place = may_be_in_place && repeat % 2 == 0;
        const int root = has_root(kind) ? repeat % size : 0;
        const std::vector<Call> calls = calls_on(kind, count, root, is_in_place, buffers);
        const std::size_t before = ranks.places();
        ASSERT_TRUE(ranks.run(calls, random)) << "the ranks wait in a circle";
        const bool has_places = kind != OpKind::kReduceScatter && kind != OpKind::kReduce &&
                                !(kind == OpKind::kAllToAll && is_in_place);
        // All segments of smaller ones may come before a rank expects them.
        if (count >= 997) {
          ASSERT_EQ(ranks.places() != before, has_places) << to_string(kind) << " of " << count;
        }
        for (int rank = 0; rank < size; ++rank) {
          if (buffers[index_of(rank)].outputs.empty()) {
            continue;
          }
          const Buffer& result = buffers[index_of(rank)].outputs[0];
          for (std::size_t index = 0; index < result.count; ++index) {
            ASSERT_EQ(static_cast<const float*>(result.data)[index],
                      expected_at(calls[index_of(rank)], size, rank, index))
                << to_string(kind) << " of " << count << ", rank " << rank << ", element " << index;
          }
        }
      }
    }
  }
}

TEST_P(ExchangeTest, EndsWhereWhatTravelsIsConverted) {
  const int size = GetParam().size();
  ExchangingRanks ranks(GetParam());
  std::mt19937 random(12);
  for (const std::size_t count : {70, 997, 3001, 9001}) {
    for (int repeat = 0; repeat < 4; ++repeat) {
      std::vector<ExchangedBuffers> buffers(index_of(size));
      std::vector<Call> calls =
          calls_on(OpKind::kAllReduce, count, /*root=*/0, /*is_in_place=*/false, buffers);
      for (Call& call : calls) {
        call.wire_dtype = DType::kBFloat16;
      }
      // So small that bfloat16 has each sum.
      for (ExchangedBuffers& own : buffers) {
        for (float& value : own.input) {
          value = std::fmod(value, 3.0F);
        }
      }
      ASSERT_TRUE(ranks.run(calls, random)) << "the ranks wait in a circle";
      for (std::size_t index = 0; index < count; ++index) {
        float sum = 0.0F;
        for (const ExchangedBuffers& own : buffers) {
          sum += own.input[index];
        }
        for (int rank = 0; rank < size; ++rank) {
          ASSERT_EQ(buffers[index_of(rank)].output[index], sum)
              << count << " elements, rank " << rank << ", element " << index;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, ExchangeTest,
    ::testing::Values(ExchangeShape{{0, 1}, 1}, ExchangeShape{{0, 1}, 3},
                      ExchangeShape{{0, 1, 2}, 1}, ExchangeShape{{0, 1, 2, 3, 4}, 2},
                      ExchangeShape{{0, 0, 1, 1}, 1}, ExchangeShape{{0, 0, 1, 1}, 3},
                      ExchangeShape{{0, 1, 0, 1, 2, 2}, 1}, ExchangeShape{{0, 1, 1, 1}, 3},
                      ExchangeShape{{0, 0, 0, 1, 1, 2, 2, 2}, 2}),
    [](const auto& info) {
      std::string name = "hosts";
      for (const int host : info.param.hosts) {
        name += std::to_string(host);
      }
      return join(name, "_window", info.param.window);
    });

}  // namespace
}  // namespace pydist
