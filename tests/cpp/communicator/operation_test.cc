#include "communicator/operation.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace pydist {
namespace {

constexpr int kGroupSize = 3;

// Each buffer has memory of its own.
Buffer buffer(std::size_t count, DType dtype = DType::kFloat32) {
  constexpr std::size_t kBytes = 256;
  static std::byte memory[64][kBytes];
  static std::size_t next = 0;
  EXPECT_LE(count * element_size(dtype), kBytes);
  return {count == 0 ? nullptr : memory[next++ % 64], count, dtype, {}};
}

Operation operation(OpKind kind, std::vector<Buffer> inputs, std::vector<Buffer> outputs,
                    int peer = 0) {
  Operation result;
  result.kind = kind;
  result.inputs = std::move(inputs);
  result.outputs = std::move(outputs);
  result.peer = peer;
  return result;
}

void accepts(const Operation& op, int rank = 1) {
  try {
    validate(op, rank, kGroupSize);
  } catch (const InvalidUsage& error) {
    ADD_FAILURE() << error.what();
  }
}

// The complaint names the kind, the rank and, in it, `about`.
void refuses(const Operation& op, const std::string& about, int rank = 1) {
  try {
    validate(op, rank, kGroupSize);
    ADD_FAILURE() << to_string(op.kind) << " was accepted; expected: " << about;
  } catch (const InvalidUsage& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find(about), std::string::npos) << text;
    EXPECT_EQ(text.rfind(join(to_string(op.kind), " on rank ", rank, " of 3: "), 0), 0u) << text;
  }
}

TEST(OperationTest, AllReduce) {
  accepts(operation(OpKind::kAllReduce, {buffer(5)}, {buffer(5)}));
  accepts(operation(OpKind::kAllReduce, {buffer(0)}, {buffer(0)}));
  refuses(operation(OpKind::kAllReduce, {buffer(5)}, {buffer(6)}), "5 elements");
  refuses(operation(OpKind::kAllReduce, {buffer(5)}, {}), "one output, got 0");
  refuses(operation(OpKind::kAllReduce, {buffer(5), buffer(5)}, {buffer(5)}), "one input, got 2");
}

TEST(OperationTest, BuffersOverlapExactlyOrNotAtAll) {
  const Buffer whole = buffer(6);
  const auto part = [&whole](std::size_t begin, std::size_t count) {
    return Buffer{static_cast<float*>(whole.data) + begin, count, whole.dtype, {}};
  };
  accepts(operation(OpKind::kAllReduce, {whole}, {whole}));
  refuses(operation(OpKind::kAllReduce, {part(0, 3)}, {part(1, 3)}), "overlap in memory");
  // Rank 1's block of three is the middle one.
  accepts(operation(OpKind::kReduceScatter, {whole}, {part(2, 2)}));
  refuses(operation(OpKind::kReduceScatter, {whole}, {part(0, 2)}), "overlap in memory");
  accepts(operation(OpKind::kAllGather, {part(2, 2)}, {whole}));
  refuses(operation(OpKind::kAllGather, {part(4, 2)}, {whole}), "overlap in memory");
  refuses(operation(OpKind::kReduceScatter, {part(0, 2), part(2, 2), part(4, 2)}, {part(3, 2)}),
          "overlap in memory");
}

TEST(OperationTest, AllToAllIsInPlaceExactlyOrNotAtAll) {
  const Buffer whole = buffer(12);
  const auto part = [&whole](std::size_t begin, std::size_t count) {
    return Buffer{static_cast<float*>(whole.data) + begin, count, whole.dtype, {}};
  };
  const auto all_to_all = [](std::vector<Buffer> in, std::vector<Buffer> out) {
    return operation(OpKind::kAllToAll, std::move(in), std::move(out));
  };
  accepts(all_to_all({whole}, {whole}));
  accepts(all_to_all({part(0, 6)}, {part(6, 6)}));
  accepts(all_to_all({part(0, 6)}, {part(0, 2), part(2, 2), part(4, 2)}));
  refuses(all_to_all({part(0, 6)}, {part(3, 6)}), "overlap in memory");
  // The blocks of other ranks.
  refuses(all_to_all({part(0, 2), part(2, 2), part(4, 2)}, {part(4, 2), part(2, 2), part(0, 2)}),
          "overlap in memory");
  // In place, but of other sizes.
  refuses(all_to_all({part(0, 1), part(2, 2), part(4, 2)}, {part(0, 2), part(2, 2), part(4, 2)}),
          "overlap in memory");
}

TEST(OperationTest, OutputsDoNotOverlapEachOther) {
  const Buffer whole = buffer(8);
  const auto part = [&whole](std::size_t begin, std::size_t count) {
    return Buffer{static_cast<float*>(whole.data) + begin, count, whole.dtype, {}};
  };
  const std::vector<Buffer> apart = {part(4, 2), part(0, 2), part(2, 2)};
  const std::vector<Buffer> touching = {part(4, 2), part(0, 2), part(1, 2)};
  accepts(operation(OpKind::kAllGather, {buffer(2)}, apart));
  refuses(operation(OpKind::kAllGather, {buffer(2)}, touching), "two outputs overlap");
  refuses(operation(OpKind::kGather, {buffer(2)}, touching, 1), "two outputs overlap");
  refuses(operation(OpKind::kAllToAll, {buffer(6)}, touching), "two outputs overlap");
  // Inputs may: they are only read.
  accepts(operation(OpKind::kReduceScatter, touching, {buffer(2)}));
}

TEST(OperationTest, ReduceScatter) {
  accepts(operation(OpKind::kReduceScatter, {buffer(6)}, {buffer(2)}));
  accepts(operation(OpKind::kReduceScatter, {buffer(1), buffer(2), buffer(0)}, {buffer(2)}));
  refuses(operation(OpKind::kReduceScatter, {buffer(7)}, {buffer(2)}), "divided by 3");
  refuses(operation(OpKind::kReduceScatter, {buffer(6)}, {buffer(3)}), "2 elements");
  refuses(operation(OpKind::kReduceScatter, {buffer(1), buffer(1)}, {buffer(1)}), "got 2");
}

TEST(OperationTest, AllGather) {
  accepts(operation(OpKind::kAllGather, {buffer(2)}, {buffer(6)}));
  accepts(operation(OpKind::kAllGather, {buffer(2)}, {buffer(9), buffer(2), buffer(0)}));
  accepts(operation(OpKind::kAllGather, {buffer(0)}, {buffer(0)}));
  refuses(operation(OpKind::kAllGather, {buffer(2)}, {buffer(2), buffer(9), buffer(2)}),
          "place for 9");
  refuses(operation(OpKind::kAllGather, {buffer(2)}, {buffer(5)}), "divided by 3");
}

TEST(OperationTest, RootedCollectives) {
  // At the root (rank 1 here), and elsewhere.
  accepts(operation(OpKind::kBroadcast, {buffer(4)}, {}, 1));
  accepts(operation(OpKind::kBroadcast, {buffer(4)}, {buffer(4)}, 1));
  accepts(operation(OpKind::kBroadcast, {}, {buffer(4)}, 0));
  refuses(operation(OpKind::kBroadcast, {}, {buffer(4)}, 1), "one input, got 0");
  refuses(operation(OpKind::kBroadcast, {buffer(4)}, {buffer(3)}, 1), "place for 3");
  refuses(operation(OpKind::kBroadcast, {}, {}, 0), "one output, got 0");

  accepts(operation(OpKind::kReduce, {buffer(4)}, {buffer(4)}, 1));
  accepts(operation(OpKind::kReduce, {buffer(4)}, {}, 0));
  refuses(operation(OpKind::kReduce, {buffer(4)}, {}, 1), "one output, got 0");

  accepts(operation(OpKind::kGather, {buffer(2)}, {buffer(6)}, 1));
  accepts(operation(OpKind::kGather, {buffer(2)}, {buffer(1), buffer(2), buffer(5)}, 1));
  accepts(operation(OpKind::kGather, {buffer(2)}, {}, 0));
  refuses(operation(OpKind::kGather, {buffer(2)}, {}, 1), "got 0");

  accepts(operation(OpKind::kScatter, {buffer(6)}, {buffer(2)}, 1));
  accepts(operation(OpKind::kScatter, {}, {buffer(2)}, 0));
  refuses(operation(OpKind::kScatter, {buffer(6)}, {buffer(3)}, 1), "2 elements");
  refuses(operation(OpKind::kScatter, {}, {}, 0), "one output");
}

TEST(OperationTest, RootsAndPeersAreRanks) {
  for (const int peer : {-1, 3, 1000, -7}) {
    refuses(operation(OpKind::kBroadcast, {}, {buffer(1)}, peer), "0 to 2");
    refuses(operation(OpKind::kReduce, {buffer(1)}, {}, peer), "root");
    refuses(operation(OpKind::kGather, {buffer(1)}, {}, peer), "root");
    refuses(operation(OpKind::kScatter, {}, {buffer(1)}, peer), "root");
    refuses(operation(OpKind::kSend, {buffer(1)}, {}, peer), "peer");
    if (peer != kAnySource) {
      refuses(operation(OpKind::kRecv, {}, {buffer(1)}, peer), "peer");
    }
  }
}

TEST(OperationTest, AllToAll) {
  accepts(operation(OpKind::kAllToAll, {buffer(6)}, {buffer(6)}));
  accepts(operation(OpKind::kAllToAll, {buffer(1), buffer(2), buffer(3)},
                    {buffer(9), buffer(2), buffer(0)}));
  refuses(operation(OpKind::kAllToAll, {buffer(1), buffer(2), buffer(3)},
                    {buffer(9), buffer(1), buffer(0)}),
          "place for 1");
  refuses(operation(OpKind::kAllToAll, {buffer(4)}, {buffer(6)}), "divided by 3");
}

TEST(OperationTest, Messages) {
  accepts(operation(OpKind::kSend, {buffer(2)}, {}, 0));
  accepts(operation(OpKind::kSend, {buffer(2)}, {}, 1));  // to itself
  accepts(operation(OpKind::kRecv, {}, {buffer(2)}, 2));
  accepts(operation(OpKind::kRecv, {}, {buffer(2)}, kAnySource));
  refuses(operation(OpKind::kSend, {}, {}, 0), "one input");
  refuses(operation(OpKind::kRecv, {}, {}, 0), "one output");
}

TEST(OperationTest, ABarrierTakesNothing) { accepts(operation(OpKind::kBarrier, {}, {})); }

TEST(OperationTest, ReductionsAreDefinedForTheirType) {
  const std::vector<OpKind> kinds = {OpKind::kAllReduce, OpKind::kReduce, OpKind::kReduceScatter};
  for (const OpKind kind : kinds) {
    for (int op_index = 0; op_index < kReduceOpCount; ++op_index) {
      for (int dtype_index = 0; dtype_index < kDTypeCount; ++dtype_index) {
        const auto dtype = static_cast<DType>(dtype_index);
        Operation op = operation(kind, {buffer(3, dtype)},
                                 {buffer(kind == OpKind::kReduceScatter ? 1 : 3, dtype)}, 1);
        op.op = static_cast<ReduceOp>(op_index);
        if (is_supported(op.op, dtype)) {
          accepts(op);
        } else {
          refuses(op, "not defined for");
        }
      }
    }
  }
  // Moving needs no arithmetic.
  Operation gather =
      operation(OpKind::kAllGather, {buffer(1, DType::kFloat8)}, {buffer(3, DType::kFloat8)});
  accepts(gather);
}

TEST(OperationTest, SumsOfFloat32TravelInSixteenBits) {
  const auto sum = [](OpKind kind, DType dtype, std::optional<DType> wire_dtype,
                      ReduceOp op = ReduceOp::kSum) {
    Operation result = operation(kind, {buffer(3, dtype)},
                                 {buffer(kind == OpKind::kReduceScatter ? 1 : 3, dtype)}, 1);
    result.op = op;
    result.wire_dtype = wire_dtype;
    return result;
  };
  for (const OpKind kind : {OpKind::kAllReduce, OpKind::kReduceScatter, OpKind::kReduce}) {
    for (const DType wire_dtype : kWireDTypes) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kPremulSum}) {
        accepts(sum(kind, DType::kFloat32, wire_dtype, op));
      }
      refuses(sum(kind, DType::kFloat32, wire_dtype, ReduceOp::kMax),
              join("'max' of float32 cannot travel as ", to_string(wire_dtype)));
      refuses(sum(kind, DType::kFloat64, wire_dtype), "of float32 in all_reduce");
      refuses(sum(kind, DType::kInt32, wire_dtype), "'sum' of int32");
    }
    refuses(sum(kind, DType::kFloat32, DType::kFloat64), "is float16 or bfloat16");
    refuses(sum(kind, DType::kFloat16, DType::kBFloat16), "'sum' of float16");
  }
  Operation gather = operation(OpKind::kAllGather, {buffer(1)}, {buffer(3)});
  gather.wire_dtype = DType::kFloat16;
  refuses(gather, "the float32 buffer cannot travel as float16");
  // The type of the buffers says nothing new.
  gather.wire_dtype = DType::kFloat32;
  accepts(gather);
  accepts(sum(OpKind::kAllReduce, DType::kInt32, DType::kInt32, ReduceOp::kMax));
  Operation barrier = operation(OpKind::kBarrier, {}, {});
  barrier.wire_dtype = DType::kFloat16;
  refuses(barrier, "the operation cannot travel");
}

TEST(OperationTest, BuffersAgreeWithEachOther) {
  refuses(operation(OpKind::kAllReduce, {buffer(3)}, {buffer(3, DType::kInt32)}),
          "float32 and int32");
  refuses(operation(OpKind::kAllGather, {buffer(1)},
                    {buffer(1), buffer(1), buffer(1, DType::kFloat16)}),
          "float32 and float16");
  Buffer elsewhere = buffer(3);
  elsewhere.device = {DeviceType::kCuda, 0};
  refuses(operation(OpKind::kAllReduce, {buffer(3)}, {elsewhere}), "one device");
  Buffer missing = buffer(3);
  missing.data = nullptr;
  refuses(operation(OpKind::kAllReduce, {missing}, {buffer(3)}), "no memory");
}

TEST(OperationTest, AWorldOfOne) {
  for (const auto& op : {operation(OpKind::kAllReduce, {buffer(5)}, {buffer(5)}),
                         operation(OpKind::kReduceScatter, {buffer(5)}, {buffer(5)}),
                         operation(OpKind::kAllGather, {buffer(5)}, {buffer(5)}),
                         operation(OpKind::kGather, {buffer(5)}, {buffer(5)}),
                         operation(OpKind::kScatter, {buffer(5)}, {buffer(5)}),
                         operation(OpKind::kAllToAll, {buffer(5)}, {buffer(5)})}) {
    EXPECT_NO_THROW(validate(op, 0, 1)) << to_string(op.kind);
  }
}

TEST(BuffersTest, HoldNoneOneOrSeveral) {
  Buffers buffers;
  EXPECT_TRUE(buffers.empty());
  const Buffers none{};
  EXPECT_EQ(none.begin(), none.end());
  for (std::size_t n = 1; n <= 4; ++n) {
    buffers.push_back(buffer(n));
    EXPECT_EQ(buffers.size(), n);
    Buffers copied = buffers;
    Buffers moved = std::move(copied);
    copied = moved;
    for (const Buffers& each : {buffers, moved, copied}) {
      ASSERT_EQ(each.size(), n);
      for (std::size_t i = 0; i < n; ++i) {
        EXPECT_EQ(each[i].count, i + 1);
        EXPECT_EQ(each.begin() + i, &each[i]);
      }
    }
  }
  buffers = {buffer(7)};
  ASSERT_EQ(buffers.size(), 1u);
  EXPECT_EQ(buffers[0].count, 7u);
  buffers = std::vector<Buffer>{buffer(1)};
  buffers.push_back(buffer(2));
  EXPECT_EQ(buffers[1].count, 2u);
  buffers.clear();
  EXPECT_TRUE(buffers.empty());
  buffers = {buffer(1), buffer(2)};
  EXPECT_EQ(buffers.end() - buffers.begin(), 2);
}

}  // namespace
}  // namespace pydist
