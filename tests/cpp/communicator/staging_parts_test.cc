// Parts of staged operations: every element passes exactly once, within its slot, and all ranks cut
// alike.

#include "communicator/staging_parts.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

namespace pydist {
namespace {

using Bytes = std::vector<std::uint8_t>;

// The devices' memory of one rank.
struct RankMemory {
  Bytes input;
  Bytes output;
};

Buffer over(Bytes& memory, std::size_t begin, std::size_t count, DType dtype) {
  return {.data = memory.data() + begin * element_size(dtype),
          .count = count,
          .dtype = dtype,
          .device = {DeviceType::kCuda, 1}};
}

// Moves blocks as the host's communicator would: block r of each rank's outputs is rank r's input.
void gather(std::vector<StagedPart>& parts) {
  for (StagedPart& to : parts) {
    for (std::size_t r = 0; r < parts.size(); ++r) {
      const Buffer& from = parts[r].operation.inputs[0];
      const Buffers& outputs = to.operation.outputs;
      Buffer target = outputs[outputs.size() == 1 ? 0 : r];
      if (outputs.size() == 1) {
        ASSERT_EQ(target.count, from.count * parts.size());
        target.data = static_cast<std::byte*>(target.data) + r * from.bytes();
      } else {
        ASSERT_EQ(target.count, from.count);
      }
      std::memmove(target.data, from.data, from.bytes());
    }
  }
}

void copy_before(const StagedPart& part, Bytes& slot) {
  for (const StagedCopy& copy : part.before) {
    ASSERT_LE(copy.offset + copy.bytes, slot.size());
    std::memcpy(slot.data() + copy.offset, copy.device, copy.bytes);
  }
}

void copy_after(const StagedPart& part, const Bytes& slot) {
  for (const StagedCopy& copy : part.after) {
    ASSERT_LE(copy.offset + copy.bytes, slot.size());
    std::memcpy(copy.device, slot.data() + copy.offset, copy.bytes);
  }
}

void expect_on_host(const Operation& operation, const Bytes& slot) {
  for (const auto* buffers : {&operation.inputs, &operation.outputs}) {
    for (const Buffer& buffer : *buffers) {
      EXPECT_EQ(buffer.device, Device{});
      const auto* const data = static_cast<const std::uint8_t*>(buffer.data);
      EXPECT_GE(data, slot.data());
      EXPECT_LE(data + buffer.bytes(), slot.data() + slot.size());
    }
  }
}

// An all_gather of `counts[r]` elements from rank r, performed part by part.
void check_gather(const std::vector<std::size_t>& counts, DType dtype, std::size_t slot_bytes,
                  bool as_one_buffer) {
  const std::size_t size = counts.size();
  const std::size_t width = element_size(dtype);
  const std::size_t total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  std::vector<RankMemory> memory(size);
  std::vector<Operation> operations(size);
  Bytes expected;
  for (std::size_t r = 0; r < size; ++r) {
    memory[r].input.resize(counts[r] * width + 1);
    for (std::size_t i = 0; i < counts[r] * width; ++i) {
      memory[r].input[i] = static_cast<std::uint8_t>(r * 31 + i * 7 + 1);
      expected.push_back(memory[r].input[i]);
    }
    memory[r].output.resize(total * width + 1);
    operations[r].kind = OpKind::kAllGather;
    operations[r].inputs = {over(memory[r].input, 0, counts[r], dtype)};
    if (as_one_buffer) {
      operations[r].outputs = {over(memory[r].output, 0, total, dtype)};
    } else {
      std::size_t begin = 0;
      for (const std::size_t count : counts) {
        operations[r].outputs.push_back(over(memory[r].output, begin, count, dtype));
        begin += count;
      }
    }
  }
  std::vector<StagingParts> of_ranks;
  for (std::size_t r = 0; r < size; ++r) {
    of_ranks.emplace_back(operations[r], static_cast<int>(r), static_cast<int>(size), slot_bytes);
    ASSERT_FALSE(of_ranks[r].is_whole());
    ASSERT_EQ(of_ranks[r].count(), of_ranks[0].count());
  }
  for (std::size_t index = 0; index < of_ranks[0].count(); ++index) {
    std::vector<Bytes> slots(size, Bytes(slot_bytes));
    std::vector<StagedPart> parts;
    for (std::size_t r = 0; r < size; ++r) {
      parts.push_back(of_ranks[r].part(index, reinterpret_cast<std::byte*>(slots[r].data())));
      validate(parts[r].operation, static_cast<int>(r), static_cast<int>(size));
      expect_on_host(parts[r].operation, slots[r]);
      copy_before(parts[r], slots[r]);
    }
    gather(parts);
    for (std::size_t r = 0; r < size; ++r) {
      copy_after(parts[r], slots[r]);
    }
  }
  expected.push_back(0);
  for (std::size_t r = 0; r < size; ++r) {
    EXPECT_EQ(memory[r].output, expected) << "rank " << r;
  }
}

TEST(StagingPartsTest, GathersEqualAndRaggedBlocks) {
  for (const DType dtype : {DType::kUInt8, DType::kBFloat16, DType::kComplex128}) {
    for (std::size_t size = 1; size <= 4; ++size) {
      const std::size_t slot = StagingParts::least_slot_bytes(static_cast<int>(size));
      const std::size_t chunk = slot / size / element_size(dtype) / 64 * 64;
      for (const std::size_t count :
           {std::size_t{0}, std::size_t{1}, chunk - 1, chunk, chunk + 1, 3 * chunk + 5}) {
        const std::vector<std::size_t> equal(size, count);
        check_gather(equal, dtype, slot, /*as_one_buffer=*/true);
        check_gather(equal, dtype, slot, /*as_one_buffer=*/false);
        std::vector<std::size_t> ragged = equal;
        ragged[size / 2] = count / 3;
        check_gather(ragged, dtype, slot, /*as_one_buffer=*/false);
      }
    }
  }
}

// What parts copy between the slot and [begin, begin + bytes) of the device, in order.
void expect_covers(const std::vector<StagedCopy>& copies, const Bytes& memory, std::size_t bytes) {
  const auto* next = reinterpret_cast<const std::byte*>(memory.data());
  for (const StagedCopy& copy : copies) {
    EXPECT_EQ(copy.device, next);
    next += copy.bytes;
  }
  EXPECT_EQ(next, reinterpret_cast<const std::byte*>(memory.data()) + bytes);
}

TEST(StagingPartsTest, FlatOperationsPassOnce) {
  constexpr std::size_t kSlotBytes = 4096;
  Bytes slot(kSlotBytes);
  auto* const place = reinterpret_cast<std::byte*>(slot.data());
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduce, OpKind::kBroadcast}) {
    for (const std::size_t count : {0, 1, 1023, 1024, 1025, 5000}) {
      for (const int rank : {0, 1}) {
        for (const bool in_place : {true, false}) {
          Bytes in(count * 4);
          Bytes other(count * 4);
          Bytes& out = in_place ? in : other;
          Operation operation;
          operation.kind = kind;
          operation.peer = 1;
          operation.factor = 0.5;
          operation.wire_dtype = DType::kBFloat16;
          operation.label = "bucket 7";
          const bool is_root = rank == 1;
          if (kind != OpKind::kBroadcast || is_root) {
            operation.inputs = {over(in, 0, count, DType::kFloat32)};
          }
          if (kind != OpKind::kReduce || is_root) {
            operation.outputs = {over(out, 0, count, DType::kFloat32)};
          }
          const StagingParts parts(operation, rank, 2, kSlotBytes);
          EXPECT_EQ(parts.count(), std::max<std::size_t>(1, (count + 1023) / 1024));
          std::vector<StagedCopy> before;
          std::vector<StagedCopy> after;
          for (std::size_t i = 0; i < parts.count(); ++i) {
            const StagedPart part = parts.part(i, place);
            expect_on_host(part.operation, slot);
            EXPECT_EQ(part.operation.peer, 1);
            EXPECT_EQ(part.operation.factor, 0.5);
            EXPECT_EQ(part.operation.wire_dtype, DType::kBFloat16);
            EXPECT_TRUE(part.operation.label.starts_with("bucket 7"));
            before.insert(before.end(), part.before.begin(), part.before.end());
            after.insert(after.end(), part.after.begin(), part.after.end());
          }
          if (!operation.inputs.empty()) {
            expect_covers(before, in, count * 4);
          } else {
            EXPECT_TRUE(before.empty());
          }
          const bool stays = kind == OpKind::kBroadcast && is_root && in_place;
          if (!operation.outputs.empty() && (!stays || count == 0)) {
            expect_covers(after, out, count * 4);
          } else {
            EXPECT_TRUE(after.empty());
          }
        }
      }
    }
  }
}

TEST(StagingPartsTest, WhatCannotBeCutIsWhole) {
  Bytes in(300);
  Bytes out(500);
  Operation operation;
  operation.kind = OpKind::kAllToAll;
  operation.inputs = {over(in, 0, 100, DType::kUInt8), over(in, 100, 200, DType::kUInt8)};
  operation.outputs = {over(out, 0, 100, DType::kUInt8), over(out, 100, 400, DType::kUInt8)};
  const StagingParts parts(operation, 0, 2, 1 << 16);
  EXPECT_TRUE(parts.is_whole());
  EXPECT_EQ(parts.count(), 1u);
  Bytes slot(parts.slot_bytes());
  const StagedPart part = parts.part(0, reinterpret_cast<std::byte*>(slot.data()));
  validate(part.operation, 0, 2);
  expect_on_host(part.operation, slot);
  EXPECT_EQ(part.before.size(), 2u);
  EXPECT_EQ(part.after.size(), 2u);
  EXPECT_EQ(part.after[1].bytes, 400u);
}

}  // namespace
}  // namespace pydist
