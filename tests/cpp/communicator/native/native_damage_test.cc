// What other processes write is damaged: whatever is read of it, a rank gets an error or wrong
// values, and goes on. All memory that ranks share is covered: posts and counters, the record of
// failure, the pages of processes, the lanes of messages.
//
// The file is long because all its tests share the dice, and what is damaged has to be made first.
//
// The ranks of these tests are driven by one thread, so that a damage lies between two steps.
// PYDIST_TEST_FUZZ sets how often each is tried.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "collectives/group.h"
#include "collectives/shared_memory/ranks_in_place.h"
#include "collectives/shared_memory/shared_memory.h"
#include "collectives/shared_memory/tuning.h"
#include "communicator/native/group_health.h"
#include "communicator/native/message_reads.h"
#include "communicator/operation.h"
#include "communicator/operation_call.h"
#include "communicator/peers/endpoint.h"
#include "communicator/peers/introduction.h"
#include "health/page_reader.h"
#include "memory/allocation_heap.h"
#include "memory/heap_window.h"
#include "ranks.h"
#include "transport/messages.h"

namespace pydist {
namespace {

int tries() {
  const char* const asked = std::getenv("PYDIST_TEST_FUZZ");
  return asked != nullptr ? std::atoi(asked) : 5'000;
}

// Random numbers that are the same in each run.
class Dice {
 public:
  // From 0 to end - 1.
  [[nodiscard]] std::size_t below(std::size_t end) { return engine_() % end; }
  [[nodiscard]] bool is_one_in(std::size_t cases) { return below(cases) == 0; }

  // Overwrites a few bytes, words or bits.
  void damage(void* memory, std::size_t bytes) {
    auto* const all = static_cast<unsigned char*>(memory);
    const std::size_t times = 1 + below(8);
    for (std::size_t i = 0; i < times; ++i) {
      const std::size_t at = below(bytes);
      switch (below(4)) {
        case 0:
          all[at] ^= static_cast<unsigned char>(1u << below(8));
          break;
        case 1:
          all[at] = static_cast<unsigned char>(engine_());
          break;
        default: {
          // Words: near what was there, at the ends of what there may be, or anything.
          std::uint64_t word = 0;
          std::byte* const place = static_cast<std::byte*>(memory) + at / 8 * 8;
          if (place + sizeof word > static_cast<std::byte*>(memory) + bytes) {
            break;
          }
          std::memcpy(&word, place, sizeof word);
          const std::array<std::uint64_t, 6> words{
              word + 1, word - 1, 0, ~std::uint64_t{0}, std::uint64_t{1} << below(64), engine_()};
          word = words[below(words.size())];
          std::memcpy(place, &word, sizeof word);
          break;
        }
      }
    }
  }

 private:
  std::mt19937_64 engine_{7};
};

// Runs what may fail, by an error of ours.
template <typename Action>
void bear(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_LT(std::strlen(error.what()), 100'000u);
  }
}

// -- collectives ----------------------------------------------------------------------------------

constexpr int kSize = 3;
constexpr int kMe = 1;
constexpr std::size_t kChunkBytes = 4096;

// The memory of a group, and its ranks.
class Ground {
 public:
  Ground() {
    for (int rank = 0; rank < kSize; ++rank) {
      segment_.reserve_control(rank);
      segment_.reserve_transit(rank);
      heaps_.emplace_back(rank, kSize, file_, std::vector<std::string>(kSize));
    }
    const SymmetricHeap::Placement placement = heaps_[0].choose_place(kHeapBytes);
    for (SymmetricHeap& heap : heaps_) {
      heap.map(placement);
    }
    for (SymmetricHeap& heap : heaps_) {
      heap.reserve(placement);
      symmetric_.push_back(heap.take(placement));
      allocations_.push_back(AllocationHeap::create(kHeapBytes));
      windows_.emplace_back();
      windows_.back().open(allocations_.back()->segment());
      windows_.back().switch_on();
    }
  }

  static constexpr std::size_t kHeapBytes = std::size_t{256} << 10;

  void clear() {
    std::memset(memory_.data(), 0, sizeof(FailureRecord) + kSize * segment_.control_stride());
  }
  [[nodiscard]] GroupSegment& segment() { return segment_; }
  [[nodiscard]] std::byte* symmetric(int rank) {
    return symmetric_[static_cast<std::size_t>(rank)];
  }

  [[nodiscard]] AllocationHeap& allocations(int rank) {
    return *allocations_[static_cast<std::size_t>(rank)];
  }

  [[nodiscard]] std::unique_ptr<Group> join(int rank) {
    std::vector<const HeapWindow*> windows;
    for (const HeapWindow& window : windows_) {
      windows.push_back(&window);
    }
    std::vector<Doorbell*> bells;
    for (Doorbell& bell : bells_) {
      bells.push_back(&bell);
    }
    // It reads what rank 0 chooses, damaged or not.
    tunings_.push_back(std::make_unique<Tuning>(
        rank, kSize, TuningLimits{kChunkBytes, false, std::nullopt}, TuningRhythm(), table_));
    return std::make_unique<Group>(
        rank, kSize, segment_, bells, heaps_[static_cast<std::size_t>(rank)], /*announcer=*/nullptr,
        /*one_shot_bytes=*/std::nullopt, tunings_.back().get(), std::move(windows));
  }

 private:
  SharedSegment memory_ = SharedSegment::create("damaged", GroupSegment::bytes(kSize, kChunkBytes));
  GroupSegment segment_{memory_, kSize, kChunkBytes};
  SharedFile file_ = SharedFile::create("heap");
  std::deque<SymmetricHeap> heaps_;
  std::vector<std::byte*> symmetric_;
  std::vector<std::shared_ptr<AllocationHeap>> allocations_;
  std::deque<HeapWindow> windows_;
  std::array<Doorbell, kSize> bells_{};
  TuningTable table_;
  std::vector<std::unique_ptr<Tuning>> tunings_;
};

// One rank's part of a collective, in buffers that are just long enough. `heap`: where they lie;
// null: in ordinary memory.
struct Part {
  std::vector<std::shared_ptr<float[]>> owned;
  AllocationHeap* heap = nullptr;
  Operation operation;
  std::unique_ptr<Group> group;
  std::unique_ptr<Execution> execution;

  Buffer buffer(std::size_t count) {
    if (heap == nullptr) {
      owned.push_back(std::make_unique<float[]>(count));
    } else {
      std::byte* const block = heap->allocate(count * sizeof(float));
      owned.emplace_back(reinterpret_cast<float*>(block),
                         [at = heap, block](float*) { at->release(block); });
      std::fill_n(owned.back().get(), count, 0.0F);
    }
    return {owned.back().get(), count, DType::kFloat32};
  }
};

// What all ranks call.
struct Plan {
  OpKind kind;
  ReduceOp op;
  int root;
  bool is_symmetric;
  bool is_shared;  // all buffers lie in the ranks' allocation heaps
  std::optional<DType> wire;
  std::array<std::array<std::size_t, kSize>, kSize> counts;  // from rank, to rank

  explicit Plan(Dice& dice) {
    constexpr std::array kKinds{OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather,
                                OpKind::kBroadcast, OpKind::kReduce,        OpKind::kGather,
                                OpKind::kScatter,   OpKind::kAllToAll,      OpKind::kBarrier};
    constexpr std::array<std::size_t, 7> kCounts{0, 1, 7, 60, 500, 3000, 6000};
    kind = kKinds[dice.below(kKinds.size())];
    op = dice.is_one_in(4) ? ReduceOp::kPremulSum : ReduceOp::kSum;
    root = static_cast<int>(dice.below(kSize));
    is_symmetric = dice.is_one_in(3);
    is_shared = !is_symmetric && dice.is_one_in(3);
    if (has_op(kind) && dice.is_one_in(4)) {
      wire = DType::kBFloat16;
    }
    const std::size_t equal = kCounts[dice.below(kCounts.size())];
    const bool is_ragged = kind != OpKind::kAllReduce && kind != OpKind::kReduce &&
                           kind != OpKind::kBroadcast && !is_symmetric && dice.is_one_in(2);
    for (auto& row : counts) {
      for (std::size_t& count : row) {
        count = is_ragged ? kCounts[dice.below(kCounts.size())] : equal;
      }
    }
    if (is_ragged && kind != OpKind::kAllToAll) {
      counts[1] = counts[2] = counts[0];  // one count for each rank, known to all
    }
  }

  [[nodiscard]] bool is_ragged() const {
    return std::any_of(counts.begin(), counts.end(), [this](const auto& row) {
      return std::any_of(row.begin(), row.end(),
                         [this](std::size_t count) { return count != counts[0][0]; });
    });
  }

  [[nodiscard]] Part part_of(int rank, Ground& ground) const {
    Part part;
    part.heap = is_shared ? &ground.allocations(rank) : nullptr;
    Operation& operation = part.operation;
    operation.kind = kind;
    operation.op = has_op(kind) ? op : ReduceOp::kSum;
    operation.peer = has_root(kind) ? root : 0;
    operation.wire_dtype = wire;
    operation.factor = 2.0;
    const bool is_root = rank == root;
    const auto me = static_cast<std::size_t>(rank);
    const auto blocks = [&](const auto& count_of) {
      std::vector<Buffer> all;
      for (std::size_t peer = 0; peer < kSize; ++peer) {
        all.push_back(part.buffer(count_of(peer)));
      }
      return Buffers(std::move(all));
    };
    const auto sent = [&](std::size_t peer) { return counts[me][peer]; };
    const auto received = [&](std::size_t peer) { return counts[peer][me]; };
    const std::size_t one = counts[0][0];
    const auto whole = [&](std::size_t count) -> Buffer {
      if (!is_symmetric) {
        return part.buffer(count);
      }
      return {ground.symmetric(rank), count, DType::kFloat32};
    };
    switch (kind) {
      case OpKind::kAllReduce:
        operation.inputs = {whole(one)};
        operation.outputs = operation.inputs;
        break;
      case OpKind::kReduce:
        operation.inputs = {part.buffer(one)};
        if (is_root) {
          operation.outputs = {part.buffer(one)};
        }
        break;
      case OpKind::kBroadcast:
        (is_root ? operation.inputs : operation.outputs) = {whole(one)};
        break;
      case OpKind::kReduceScatter:
        operation.inputs = is_symmetric || (is_shared && !is_ragged()) ? Buffers{whole(kSize * one)}
                                                                       : blocks(sent);
        operation.outputs = {part.buffer(counts[me][me])};
        break;
      case OpKind::kAllGather:
        operation.inputs = {part.buffer(counts[me][me])};
        operation.outputs = is_symmetric
                                ? Buffers{whole(kSize * one)}
                                : blocks([&](std::size_t peer) { return counts[peer][peer]; });
        break;
      case OpKind::kGather:
        operation.inputs = {part.buffer(counts[me][me])};
        if (is_root) {
          operation.outputs = blocks([&](std::size_t peer) { return counts[peer][peer]; });
        }
        break;
      case OpKind::kScatter:
        if (is_root) {
          operation.inputs = is_shared && !is_ragged() ? Buffers{whole(kSize * one)} : blocks(sent);
        }
        operation.outputs = {part.buffer(counts[static_cast<std::size_t>(root)][me])};
        break;
      case OpKind::kAllToAll:
        operation.inputs = is_shared && !is_ragged() ? Buffers{whole(kSize * one)} : blocks(sent);
        operation.outputs = blocks(received);
        break;
      default:
        break;
    }
    return part;
  }
};

bool step(Part& part) {
  if (part.execution->is_done() || !part.execution->is_ready()) {
    return false;
  }
  part.execution->resume();
  return true;
}

TEST(NativeDamageTest, PostsAndCountersOfPeersHurtNobody) {
  Dice dice;
  Ground ground;
  int done = 0;
  const int times = tries();
  for (int i = 0; i < times; ++i) {
    ground.clear();
    const Plan plan(dice);
    std::array<Part, kSize> parts;
    for (int rank = 0; rank < kSize; ++rank) {
      Part& part = parts[static_cast<std::size_t>(rank)];
      part = plan.part_of(rank, ground);
      validate(part.operation, rank, kSize);
      part.group = ground.join(rank);
      part.group->begin();
      part.execution = std::make_unique<Execution>(
          run_shared_memory(*part.group, resolve(part.operation, rank, kSize)));
    }
    // All ranks go on for a while, the others first; then one of these does damage, and is gone.
    const bool is_sound = dice.is_one_in(16);
    const std::size_t turns = is_sound ? 1000 : 1 + dice.below(6);
    for (std::size_t turn = 0; turn < turns; ++turn) {
      for (const std::size_t rank : {0u, 2u, 1u}) {
        if (rank == kMe && turn == 0 && !is_sound) {
          continue;
        }
        bear([&] { step(parts[rank]); });
      }
    }
    if (is_sound) {
      ASSERT_TRUE(parts[kMe].execution->is_done()) << to_string(plan.kind);
      ++done;
      continue;
    }
    RankControl& control = ground.segment().control(dice.is_one_in(2) ? 0 : 2);
    // Not both: with counts and counters of one's own a rank could be kept at work for years.
    if (dice.is_one_in(4)) {
      dice.damage(&control.completed, sizeof control - offsetof(RankControl, completed));
    } else {
      const std::size_t behind = ground.segment().control_stride() - sizeof control;
      switch (dice.below(3)) {
        case 0:
          dice.damage(&control.posts[1], sizeof(Post));
          break;
        case 1:
          dice.damage(&control.details[1], sizeof(PostDetail));
          break;
        default:
          dice.damage(&control + 1, std::min(behind, kPostDepth * kSize * sizeof(std::uint64_t)));
          dice.damage(&control.posts[1].flags, 1);
          break;
      }
    }
    bear([&] {
      for (int turn = 0; turn < 1000 && step(parts[kMe]); ++turn) {
      }
    });
  }
  EXPECT_GT(done, times / 64);
}

// -- what is told of peers ------------------------------------------------------------------------

TEST(NativeDamageTest, PagesAndRecordsOfPeersHurtNobody) {
  Dice dice;
  Ground ground;
  const auto endpoint = std::make_shared<Endpoint>(testing::test_environment());
  std::vector<PeerPtr> peers;
  std::vector<SharedSegment> pages;
  for (int rank = 0; rank < kSize; ++rank) {
    pages.push_back(SharedSegment::create("page", sizeof(ProcessPage)));
    auto peer = std::make_shared<Peer>();
    peer->description = join("pid ", rank, " on host a");
    peer->page = reinterpret_cast<const ProcessPage*>(pages.back().data());
    peer->doorbell = &endpoint->doorbell();
    peers.push_back(std::move(peer));
  }
  GroupHealth health("world", kMe, endpoint, ground.segment(), peers, std::chrono::minutes(1));
  for (int i = 0; i < tries(); ++i) {
    auto* const page = reinterpret_cast<ProcessPage*>(pages[dice.is_one_in(2) ? 0 : 2].data());
    if (i % 64 == 0) {
      std::memset(static_cast<void*>(page), 0, sizeof *page);
      ground.clear();
      page->heartbeat_ns = monotonic_ns();
    }
    const Journal::Ticket ticket = page->journal.begin(
        health.fingerprint(), static_cast<std::uint64_t>(i), 0, 8, "bucket 7, first parameter a");
    if (dice.is_one_in(2)) {
      page->journal.finish(ticket, JournalState::kSucceeded);
    }
    dice.damage(page, sizeof *page);
    FailureRecord& record = ground.segment().failure();
    bool is_slow = false;
    switch (dice.below(16)) {
      case 0:
        // A writer that does not come to its end is waited for, a tenth of a second.
        is_slow = dice.is_one_in(256);
        if (is_slow) {
          dice.damage(&record, 8);
        }
        break;
      case 1:
        ground.clear();
        static_cast<void>(record.set(ErrorKind::kPeerLost, "rank 0 has died", 0));
        dice.damage(reinterpret_cast<std::byte*>(&record) + 4, sizeof record - 4);
        // No end anywhere, either.
        if (dice.is_one_in(4)) {
          std::memset(reinterpret_cast<std::byte*>(&record) + 64, 'x', sizeof record - 64);
        }
        break;
      case 2:
        dice.damage(&ground.segment().control(0), ground.segment().control_stride());
        break;
      default:
        break;
    }
    if (const std::exception_ptr failure = health.failure()) {
      EXPECT_LE(describe(failure).message.size(), 2 * sizeof(FailureRecord));
    }
    for (int rank = 0; rank < kSize; ++rank) {
      EXPECT_LT(health.where(rank, OpKind::kAllReduce, 7).size(), 10'000u);
      static_cast<void>(health.why_vain(rank));
    }
    static_cast<void>(health.why_vain(-1));
    static_cast<void>(health.absence());
    EXPECT_LT(health.not_begun(health.fingerprint(), 7).size(), std::size_t{kSize});
    static_cast<void>(health.whereabouts());
    const PageReading reading = read_page(pages[0].fd());
    EXPECT_LE(reading.entries.size(), 64u);
    if (is_slow) {
      ground.clear();
    }
  }
}

// -- messages -------------------------------------------------------------------------------------

TEST(NativeDamageTest, LanesOfPeersHurtNobody) {
  Dice dice;
  constexpr std::array<std::size_t, 7> kCounts{0, 1, 8, 9, 5000, 100'000, 200'000};
  const LaneTable table(2);
  const LaneSegment lanes(SharedSegment::create("lanes", LaneSegment::bytes(table, kMessageLanes)),
                          table, kMessageLanes);
  for (int rank = 0; rank < 2; ++rank) {
    lanes.reserve_counters(rank);
    for (int peer = 0; peer < 2; ++peer) {
      lanes.reserve_lane(rank, peer);
    }
  }
  std::array<Doorbell, 2> bells{};
  testing::SharingRanks sharing{
      std::vector<ProcessMemory>(testing::kRanksThatShare, testing::own_memory())};
  sharing.switch_on();
  TuningTable known;  // reads are quicker
  for (const bool sends_too : {false, true}) {
    known.put({.kind = OpKind::kRecv, .size_class = 16, .sends_too = sends_too},
              {.choice = {.in_place = true}, .times_us = {}});
  }
  const MessageWays ways(TuningRhythm(), &known);
  const int times = std::max(1, tries() / 4);
  for (int i = 0; i < times; ++i) {
    for (int sender = 0; sender < 2; ++sender) {
      for (int receiver = 0; receiver < 2; ++receiver) {
        std::memset(static_cast<void*>(&lanes.counters(sender, receiver)), 0, sizeof(LaneCounters));
        std::memset(static_cast<void*>(&lanes.rings(sender, receiver)), 0, sizeof(LaneRings));
        for (std::uint64_t number = 0; number < kLaneDepth; ++number) {
          std::memset(static_cast<void*>(&lanes.announcement(sender, receiver, number)), 0,
                      sizeof(Announcement));
        }
      }
    }
    std::deque<Messages> both;
    for (const int rank : {0, 1}) {
      both.emplace_back(rank, 2, lanes, std::vector<Doorbell*>{&bells[0], &bells[1]},
                        /*carrier=*/nullptr,
                        message_reads({std::shared_ptr<void>(), &sharing.group(rank)}), ways);
    }
    std::deque<std::vector<float>> buffers;
    const std::size_t messages = 1 + dice.below(6);
    for (std::size_t number = 0; number < messages; ++number) {
      const auto sender = static_cast<int>(dice.below(2));
      const std::size_t count = kCounts[dice.below(kCounts.size())];
      const std::uint64_t tag = dice.below(2);
      for (const int rank : {0, 1}) {
        buffers.emplace_back(count);
        // Each has a MiB of the heap.
        void* const data = dice.is_one_in(2)
                               ? static_cast<void*>(sharing.block(rank) + (number << 20))
                               : buffers.back().data();
        const Buffer buffer{data, count, DType::kFloat32};
        if (rank == sender) {
          both[static_cast<std::size_t>(rank)].send(1 - rank, tag, buffer, [](int) {});
        } else {
          both[static_cast<std::size_t>(rank)].receive(
              dice.is_one_in(4) ? std::nullopt : std::optional(sender), tag, buffer, [](int) {});
        }
      }
    }
    const std::size_t turns = dice.below(4);
    for (std::size_t turn = 0; turn < turns; ++turn) {
      bear([&] { both[1].advance(); });
      bear([&] { both[0].advance(); });
    }
    const int sender = dice.is_one_in(2) ? 0 : 1;
    if (dice.is_one_in(3)) {
      dice.damage(&lanes.counters(sender, 1 - sender), sizeof(LaneCounters));
    } else if (dice.is_one_in(2)) {
      dice.damage(&lanes.rings(sender, 1 - sender), sizeof(LaneRings));
    } else {
      dice.damage(&lanes.announcement(sender, 1 - sender, dice.below(messages)),
                  sizeof(Announcement));
    }
    bear([&] {
      for (int turn = 0; turn < 100 && both[0].advance(); ++turn) {
        bear([&] { both[1].advance(); });
      }
    });
  }
}

// -- what the store holds, which any local user can write -----------------------------------------

TEST(NativeDamageTest, IntroductionsOfStrangersHurtNobody) {
  Dice dice;
  Introduction right;
  right.card.address = "pydist-0123456789abcdef0123456789abcdef";
  right.card.host_identity = "a boot";
  right.card.host_name = "a";
  right.card.pid = 71;
  right.card.processors = {0, 1, 2};
  right.card.processor_quota = 1.5;
  right.settings = "layout 6";
  right.token = "a token";
  const std::string text = right.to_text();
  int understood = 0;
  for (int i = 0; i < tries(); ++i) {
    std::string said = text;
    dice.damage(said.data(), said.size());
    if (dice.is_one_in(4)) {
      said.resize(dice.below(said.size()));
    }
    try {
      static_cast<void>(Introduction::from_text(said));
      ++understood;
    } catch (const std::exception&) {
      // As it should be.
    }
  }
  EXPECT_GT(understood, 0);
}

}  // namespace
}  // namespace pydist
