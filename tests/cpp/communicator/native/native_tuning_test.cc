// Collectives of the native engine while the tuner tries all candidates: the bits of a result are
// the same whatever was chosen, ranks agree amid a change, and words that make no sense are found.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "collective_case.h"
#include "collectives/shared_memory/tuning.h"
#include "communicator/native/native_communicator.h"
#include "heap_of_cases.h"
#include "ranks.h"
#include "restless.h"
#include "run_cases.h"

namespace pydist::testing {
namespace {

constexpr OpKind kDataKinds[] = {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllGather,
                                 OpKind::kBroadcast, OpKind::kReduce,        OpKind::kGather,
                                 OpKind::kScatter,   OpKind::kAllToAll};

// Runs the cases again and again in another order each time, and checks each.
void run_restlessly(const std::vector<PreparedCase>& cases, int size, int times,
                    Placement placement, const TuningRhythm& rhythm = kRestless) {
  run_ranks(size, [&](RankOfTest& self) {
    const CommunicatorPtr group = join_restless(self, test_environment(), rhythm);
    const HeapOfCases heap(*group, self.rank, placement, std::size_t{64} << 20);
    CaseBuffers buffers(heap.bytes());
    for (int time = 0; time < times; ++time) {
      for (std::size_t i = 0; i < cases.size(); ++i) {
        const std::uint64_t dice = mix(static_cast<std::uint64_t>(time) * 1000 + i);
        const PreparedCase& each = cases[dice % cases.size()];
        Operation operation = buffers.lay_out(each, self.rank, placement);
        if (mix(dice + static_cast<std::uint64_t>(self.rank)) % 4 == 0) {
          group->submit(std::move(operation))->wait();
        } else {
          group->run(std::move(operation));
        }
        const std::string wrong = buffers.check();
        ASSERT_TRUE(wrong.empty())
            << "rank " << self.rank << ", " << each.what.to_string() << ": " << wrong;
      }
    }
    group->run(barrier());
  });
}

// Tests of one process share its table.
class NativeTuningTest : public ::testing::Test {
 protected:
  void SetUp() override { TuningTable::of_process().replace({}); }
  void TearDown() override { TuningTable::of_process().replace({}); }
};
class NativeTuning : public NativeTuningTest, public ::testing::WithParamInterface<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, NativeTuning, ::testing::Values(2, 3));

TEST_P(NativeTuning, NoChoiceChangesABit) {
  const int size = GetParam();
  std::vector<PreparedCase> cases;
  std::uint64_t seed = 11 << 20;
  for (const OpKind kind : kDataKinds) {
    for (const std::size_t bytes : {std::size_t{40'000}, std::size_t{300'000}}) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        const std::size_t lanes = has_blocks(kind) ? static_cast<std::size_t>(size) : 1;
        Case what = any_case(kind, dtype, ReduceOp::kSum, size,
                             bytes / lanes / element_size(dtype) + 1, ++seed);
        cases.push_back(prepare(what, size, SummationOrder::kRanks));
        if (has_blocks(kind)) {  // and one that can be read in place
          what.is_flat = true;
          what.is_in_place = false;
          cases.push_back(prepare(what, size, SummationOrder::kRanks));
        }
      }
    }
  }
  for (const Placement placement :
       {Placement::kMixed, Placement::kOrdinary, Placement::kSharedMixed, Placement::kShared}) {
    run_restlessly(cases, size, 24, placement);
  }
  const auto found = timed(size);
  for (const TunedMemory memory : {TunedMemory::kOrdinary, TunedMemory::kShared}) {
    for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kAllToAll}) {
      const auto of_kind = found.find({kind, memory});
      ASSERT_NE(of_kind, found.end()) << to_string(kind) << " of " << to_string(memory);
      const std::string what = join(to_string(kind), " of ", to_string(memory), " memory");
      EXPECT_TRUE(of_kind->second.contains({0, false, false})) << what << " in one shot";
      EXPECT_TRUE(of_kind->second.contains({64 << 10, false, false})) << what << " in pieces";
      if (memory == TunedMemory::kShared) {
        EXPECT_TRUE(of_kind->second.contains({0, false, true})) << what << " in place";
      }
    }
  }
}

// Groups that begin with single copies, as another one has found them to be fastest.
TEST_P(NativeTuning, SingleCopiesChangeNoBit) {
  const int size = GetParam();
  TuningEntry entry;
  entry.choice = {.piece_bytes = 0, .streams = false, .in_place = true};
  std::map<TuningKey, TuningEntry> known;
  std::vector<PreparedCase> cases;
  std::uint64_t seed = 13 << 20;
  for (const OpKind kind : kDataKinds) {
    if (is_reduction(kind)) {
      continue;
    }
    known.insert_or_assign({kind, TunedMemory::kOrdinary, size, 18}, entry);
    for (const std::size_t bytes : {std::size_t{100'000}, std::size_t{300'000}}) {
      const std::size_t lanes = has_blocks(kind) ? static_cast<std::size_t>(size) : 1;
      Case what =
          any_case(kind, DType::kBFloat16, ReduceOp::kSum, size, bytes / lanes / 2 + 1, ++seed);
      what.is_flat = true;
      what.is_in_place = what.is_in_place && kind != OpKind::kAllToAll;
      cases.push_back(prepare(what, size, SummationOrder::kRanks));
      if (has_blocks(kind)) {
        what.counts = ragged_counts(kind, size, bytes / lanes, ++seed);
        what.is_flat = what.is_in_place = false;  // not read where it is an all_to_all
        cases.push_back(prepare(what, size, SummationOrder::kRanks));
      }
    }
  }
  TuningTable::of_process().replace(known);
  // Long before it tries anything else.
  run_restlessly(cases, size, 12, Placement::kMixed, {.uses_before_first = 100, .rounds = 1});
  run_restlessly(cases, size, 24, Placement::kOrdinary, {.uses_before_first = 6, .rounds = 1});
  const auto found = timed(size);
  for (const OpKind kind : {OpKind::kAllGather, OpKind::kAllToAll}) {
    const auto of_kind = found.find({kind, TunedMemory::kOrdinary});
    ASSERT_NE(of_kind, found.end()) << to_string(kind);
    EXPECT_TRUE(of_kind->second.contains({0, false, true})) << to_string(kind);
  }
}

TEST_P(NativeTuning, NoChoiceChangesABitOfAnyTypeAndOp) {
  const int size = GetParam();
  std::vector<PreparedCase> cases;
  std::uint64_t seed = 12 << 20;
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduceScatter}) {
    for (int dtype = 0; dtype < kDTypeCount; ++dtype) {
      for (int op = 0; op < kReduceOpCount; ++op) {
        if (is_supported(static_cast<ReduceOp>(op), static_cast<DType>(dtype))) {
          const std::size_t lanes = has_blocks(kind) ? static_cast<std::size_t>(size) : 1;
          cases.push_back(prepare(
              any_case(kind, static_cast<DType>(dtype), static_cast<ReduceOp>(op), size,
                       70'000 / lanes / element_size(static_cast<DType>(dtype)) + 1, ++seed),
              size, SummationOrder::kRanks));
        }
      }
    }
  }
  run_restlessly(cases, size, 3, Placement::kOrdinary);
}

TEST_P(NativeTuning, TriesBothStoresOfLargeResults) {
  const int size = GetParam();
  std::vector<PreparedCase> cases;
  std::uint64_t seed = 13 << 20;
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kBroadcast}) {
    cases.push_back(prepare(any_case(kind, DType::kFloat32, ReduceOp::kSum, size, 900'000, ++seed),
                            size, SummationOrder::kRanks));
  }
  for (const Placement placement : {Placement::kOrdinary, Placement::kHeap}) {
    run_restlessly(cases, size, 30, placement, kShortSessions);
  }
  const auto found = timed(size);
  for (const TunedMemory memory : {TunedMemory::kOrdinary, TunedMemory::kSymmetric}) {
    const auto of_kind = found.find({OpKind::kAllReduce, memory});
    ASSERT_NE(of_kind, found.end()) << to_string(memory);
    std::set<bool> stores;
    for (const auto& [piece, streams, in_place] : of_kind->second) {
      stores.insert(streams);
    }
    EXPECT_EQ(stores.size(), 2u) << to_string(memory);
  }
}

// What each rank contributes to a large operation of its class. `wire`: see results_of().
std::vector<std::vector<float>> inputs_of(const TuningKey& key, DType wire) {
  std::vector<std::vector<float>> inputs(static_cast<std::size_t>(key.ranks));
  for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
    inputs[rank].resize(top_of(key.size_class) / element_size(wire) - 3);
    for (std::size_t i = 0; i < inputs[rank].size(); ++i) {
      const std::uint64_t dice = mix(i * 8 + rank);
      inputs[rank][i] = static_cast<float>(static_cast<double>(dice % 1'000'003) / 977.0);
    }
  }
  return inputs;
}

// Runs all_reduces with the table saying `choice` and a tuner that tries
// nothing; the result of each rank. `wire`: the type in which elements travel.
std::vector<std::vector<float>> results_of(Choice choice, const TuningKey& key, DType wire,
                                           const std::vector<std::vector<float>>& inputs) {
  TuningEntry entry;
  entry.choice = choice;
  TuningTable::of_process().replace({{key, entry}});
  constexpr TuningRhythm kNever{.uses_before_first = std::size_t{1} << 40};
  std::vector<std::vector<float>> results(static_cast<std::size_t>(key.ranks));
  run_ranks(key.ranks, [&](RankOfTest& self) {
    const CommunicatorPtr group = join_restless(self, test_environment(), kNever);
    std::vector<float> values;
    // A choice about going ahead holds from the second operation on.
    for (int time = 0; time < 2; ++time) {
      values = inputs[static_cast<std::size_t>(self.rank)];
      Operation operation = all_reduce(values);
      operation.wire_dtype = wire;
      group->run(std::move(operation));
    }
    results[static_cast<std::size_t>(self.rank)] = values;
  });
  return results;
}

bool same_bits(const std::vector<float>& one, const std::vector<float>& other) {
  return one.size() == other.size() &&
         std::memcmp(one.data(), other.data(), one.size() * sizeof(float)) == 0;
}

// All candidates of some classes, pinned one by one, and their results compared with each other.
TEST_P(NativeTuning, AllCandidatesAreBitwiseEqual) {
  const int size = GetParam();
  const TuningLimits limits{test_environment().chunk_bytes, false, std::nullopt};
  for (const auto& [memory, wire] : {std::pair(TunedMemory::kOrdinary, DType::kFloat32),
                                     std::pair(TunedMemory::kConverted, DType::kBFloat16)}) {
    std::set<std::uint32_t> pieces;
    std::set<bool> stores;
    for (const int size_class : {17, 19, 22}) {
      const TuningKey key{OpKind::kAllReduce, memory, size, size_class};
      const std::vector<Choice> choices = candidates_for(key, limits);
      const auto inputs = inputs_of(key, wire);
      const auto expected = results_of(choices[0], key, wire, inputs);
      for (const Choice& choice : choices) {
        pieces.insert(choice.piece_bytes);
        stores.insert(choice.streams);
        EXPECT_TRUE(std::ranges::equal(results_of(choice, key, wire, inputs), expected, same_bits))
            << to_string(memory) << ", 2^" << size_class << " bytes in pieces of "
            << choice.piece_bytes << ", streams: " << choice.streams;
      }
      for (const std::vector<float>& each : expected) {
        EXPECT_TRUE(same_bits(each, expected[0]));
      }
    }
    EXPECT_TRUE(pieces.contains(0) && pieces.size() >= 4) << to_string(memory);
    EXPECT_EQ(stores.size(), memory == TunedMemory::kOrdinary ? 2u : 1u) << to_string(memory);
  }
}

// -- what is pinned, and what is known ------------------------------------------------------------

// Runs `times` all_reduces of `count` floats on two ranks.
void reduce_often(const Environment& environment, std::size_t count, int times,
                  const TuningRhythm& rhythm = kRestless) {
  run_ranks(
      2,
      [&](RankOfTest& self) {
        const CommunicatorPtr group = join_restless(self, environment, rhythm);
        std::vector<float> values(count, 0.0F);
        for (int time = 0; time < times; ++time) {
          group->run(all_reduce(values));
        }
      },
      environment);
}

TEST_F(NativeTuningTest, OffTimesNothing) {
  Environment environment = test_environment();
  environment.tuning = TuningChoice::kOff;
  reduce_often(environment, 100'000, 100);
  EXPECT_TRUE(timed(2).empty());
}

TEST_F(NativeTuningTest, AChunkOfTheUsersIsTheOnlyPiece) {
  Environment environment = test_environment();
  environment.pins_chunk = true;
  environment.one_shot_bytes = 1 << 14;
  reduce_often(environment, 100'000, 100);
  EXPECT_TRUE(timed(2).empty());
  environment.one_shot_bytes.reset();
  reduce_often(environment, 50'000, 100);
  const auto found = timed(2)[{OpKind::kAllReduce, TunedMemory::kOrdinary}];
  const std::set<Way> whole_or_chunk = {{0, false, false}, {512 << 10, false, false}};
  EXPECT_EQ(found, whole_or_chunk);
  for (const auto& [key, entry] : TuningTable::of_process().entries()) {
    EXPECT_FALSE(entry.is_learnt);
  }
}

TEST_F(NativeTuningTest, ALimitOfTheUsersStays) {
  Environment environment = test_environment();
  environment.one_shot_bytes = 1 << 20;
  reduce_often(environment, 50'000, 100);
  EXPECT_TRUE(timed(2).empty());
  environment.one_shot_bytes = 0;
  reduce_often(environment, 50'000, 100);
  const auto found = timed(2)[{OpKind::kAllReduce, TunedMemory::kOrdinary}];
  EXPECT_FALSE(found.contains({0, false, false}));
  EXPECT_TRUE(found.contains({64 << 10, false, false}));
}

TEST_F(NativeTuningTest, BeginsWithTheTable) {
  const TuningKey key{OpKind::kAllReduce, TunedMemory::kOrdinary, 2, 20};
  TuningEntry entry;
  entry.choice = {128 << 10, false};
  TuningTable::of_process().replace({{key, entry}});
  Tuning tuning(0, 2, {512 << 10, false, std::nullopt}, {}, TuningTable::of_process());
  Buffer buffer{nullptr, 200'000, DType::kFloat32};
  Call call{};
  call.kind = OpKind::kAllReduce;
  call.dtype = call.wire_dtype = DType::kFloat32;
  call.count = 200'000;
  call.inputs = Blocks({&buffer, 1}, 2);
  const std::optional<TuningWord> word = tuning.begin(call, TunedMemory::kOrdinary);
  ASSERT_TRUE(word.has_value());
  EXPECT_EQ(word->piece_bytes, 128u << 10);
  // Of a size nearby, too; of other ranks, not.
  call.count = 400'000;
  EXPECT_EQ(tuning.begin(call, TunedMemory::kOrdinary)->piece_bytes, 128u << 10);
  Tuning of_three(0, 3, {512 << 10, false, std::nullopt}, {}, TuningTable::of_process());
  EXPECT_FALSE(of_three.begin(call, TunedMemory::kOrdinary).has_value());
}

TEST_F(NativeTuningTest, GivesDataAsHeardAndElseAsUsual) {
  Tuning tuning(1, 2, {512 << 10, false, std::nullopt, true}, {}, TuningTable::of_process());
  Call call{};
  call.kind = OpKind::kAllGather;
  call.dtype = call.wire_dtype = DType::kFloat32;
  constexpr std::size_t kBytes = 100'000;
  // Asked amid functions that promise not to throw: so nothing may be allocated.
  static_assert(noexcept(
      std::as_const(tuning).agreed_way(call, TunedMemory::kOrdinary, kBytes, Offer::kEager)));
  TuningWord word;
  word.size_class = static_cast<std::uint8_t>(size_class_of(kBytes));
  constexpr Offer kWays[] = {Offer::kEager, Offer::kInPieces, Offer::kInItsProcess};
  for (const Offer usually : kWays) {
    EXPECT_EQ(tuning.agreed_way(call, TunedMemory::kOrdinary, kBytes, usually), usually);
    EXPECT_EQ(tuning.agreed_way(call, TunedMemory::kOrdinary, 4 * kBytes, usually), usually);
  }
  const auto shared_way = [&](Offer usual) {
    return tuning.agreed_way(call, TunedMemory::kShared, kBytes, usual);
  };
  for (const auto& [next, way] : {std::pair(TuningWord::Next::kAhead, Offer::kEager),
                                  std::pair(TuningWord::Next::kInPieces, Offer::kInPieces),
                                  std::pair(TuningWord::Next::kInPlace, Offer::kInItsProcess),
                                  std::pair(TuningWord::Next::kAsBefore, Offer::kInItsProcess)}) {
    word.next = next;
    tuning.hear(call, word);
    for (const Offer usually : kWays) {
      EXPECT_EQ(tuning.agreed_way(call, TunedMemory::kOrdinary, kBytes, usually), way);
      // Of another class, nothing has been heard.
      EXPECT_EQ(tuning.agreed_way(call, TunedMemory::kOrdinary, 4 * kBytes, usually), usually);
      call.root = 1;
      EXPECT_EQ(tuning.agreed_way(call, TunedMemory::kOrdinary, kBytes, usually), usually);
      call.root = 0;
      EXPECT_EQ(shared_way(usually), usually);
    }
  }
  // Of data in the allocation heaps, which is the matter of other words.
  word.is_of_shared = 1;
  for (const auto& [next, way] : {std::pair(TuningWord::Next::kAhead, Offer::kEager),
                                  std::pair(TuningWord::Next::kInPieces, Offer::kInPieces),
                                  std::pair(TuningWord::Next::kInPlace, Offer::kShared),
                                  std::pair(TuningWord::Next::kAsBefore, Offer::kShared)}) {
    word.next = next;
    tuning.hear(call, word);
    EXPECT_EQ(shared_way(Offer::kEager), way);
    EXPECT_EQ(tuning.agreed_way(call, TunedMemory::kOrdinary, kBytes, Offer::kEager),
              Offer::kInItsProcess);
  }
}

TEST_F(NativeTuningTest, SaysNothingOfSmallOperations) {
  Tuning tuning(0, 2, {512 << 10, false, std::nullopt}, kRestless, TuningTable::of_process());
  Call call{};
  call.kind = OpKind::kAllReduce;
  call.dtype = call.wire_dtype = DType::kFloat32;
  call.count = 2048;  // 8 KiB
  for (int i = 0; i < 100; ++i) {
    EXPECT_FALSE(tuning.begin(call, TunedMemory::kOrdinary).has_value());
    EXPECT_FALSE(tuning.is_timed(Route::kOneShot));
  }
}

// -- words that make no sense ---------------------------------------------------------------------

TEST_F(NativeTuningTest, FindsWordsThatMakeNoSense) {
  const Tuning tuning(1, 2, {512 << 10, false, std::nullopt}, {}, TuningTable::of_process());
  Call call{};
  call.kind = OpKind::kAllReduce;
  TuningWord good;
  good.piece_bytes = 128 << 10;
  good.size_class = 20;
  good.next = TuningWord::Next::kInPieces;
  EXPECT_TRUE(tuning.is_sound(call, good));
  const auto with = [&](const auto& damage) {
    TuningWord word = good;
    damage(word);
    return tuning.is_sound(call, word);
  };
  for (const std::uint32_t piece : {0u, 1u, 4096u, 65535u, 65537u, (512u << 10) + 64, ~0u}) {
    EXPECT_FALSE(with([&](TuningWord& word) { word.piece_bytes = piece; })) << piece;
  }
  EXPECT_FALSE(with([](TuningWord& word) { word.size_class = 0; }));
  EXPECT_FALSE(with([](TuningWord& word) { word.size_class = 200; }));
  EXPECT_FALSE(with([](TuningWord& word) { word.streams = 2; }));
  EXPECT_FALSE(with([](TuningWord& word) { word.is_of_shared = 2; }));
  EXPECT_FALSE(with([](TuningWord& word) { word.next = static_cast<TuningWord::Next>(4); }));
  // What does not fit into a slot can't go ahead, and nobody reads what others forbid or what is
  // reduced.
  EXPECT_FALSE(with([](TuningWord& word) { word.next = TuningWord::Next::kAhead; }));
  EXPECT_FALSE(with([](TuningWord& word) { word.next = TuningWord::Next::kInPlace; }));
  good.next = TuningWord::Next::kInPlace;
  call.kind = OpKind::kAllGather;
  EXPECT_FALSE(tuning.is_sound(call, good));
  // What lies in the allocation heaps can be read by all in any case.
  EXPECT_TRUE(with([](TuningWord& word) { word.is_of_shared = 1; }));
  const Tuning of_readers(1, 2, {512 << 10, false, std::nullopt, true}, {},
                          TuningTable::of_process());
  EXPECT_TRUE(of_readers.is_sound(call, good));
  call.wire_dtype = DType::kBFloat16;  // converted on the way
  EXPECT_FALSE(of_readers.is_sound(call, good));
  call.wire_dtype = call.dtype;
  call.kind = OpKind::kReduceScatter;
  EXPECT_FALSE(of_readers.is_sound(call, good));
  good.next = TuningWord::Next::kInPieces;
  call.kind = OpKind::kBarrier;
  EXPECT_FALSE(tuning.is_sound(call, good));
}

}  // namespace
}  // namespace pydist::testing
