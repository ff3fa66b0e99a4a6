// One collective with its data, for checking an engine bit by bit.
//
// A Case says what is called and on how much; prepare() makes every rank's inputs and the outputs
// that each rank must end with, from the promised order of summation and the element-wise kernels
// (which have tests of their own). CaseBuffers lays them out in a rank's memory, between guards.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/op_kind.h"
#include "base/reduce_op.h"
#include "communicator/operation.h"

namespace pydist::testing {

// In which order the elements of a reduction are combined.
enum class SummationOrder {
  kRanks,  // 0 to p-1
  // As ring_schedule.h says, where there is a ring algorithm; in a wire type, every partial sum is
  // rounded to it.
  kRing,
};

// Where the buffers of a case lie: in ordinary memory, the symmetric heap, the allocation heap of
// each rank that the others read, or some here and some there. kBothHeaps: ranks of even numbers in
// the symmetric heap and the others in their allocation heaps.
enum class Placement { kOrdinary, kHeap, kMixed, kShared, kSharedMixed, kBothHeaps };

[[nodiscard]] std::string to_string(Placement placement);

struct Case {
  OpKind kind = OpKind::kAllReduce;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  std::optional<DType> wire_dtype;
  int root = 0;
  // Elements: of the buffer (all_reduce, broadcast, reduce: one entry), of each rank's block
  // (reduce_scatter, all_gather, gather, scatter: p entries), or of each pair's block (all_to_all:
  // the one from s to r at s * p + r).
  std::vector<std::size_t> counts;
  bool is_flat = true;  // blocks in one buffer; only where they are equal
  bool is_in_place = false;
  std::uint64_t seed = 0;

  [[nodiscard]] std::string to_string() const;
};

[[nodiscard]] constexpr bool is_reduction(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter || kind == OpKind::kReduce;
}
// Whether there is a block for each rank, or for each pair of ranks.
[[nodiscard]] constexpr bool has_blocks(OpKind kind) {
  return kind != OpKind::kAllReduce && kind != OpKind::kBroadcast && kind != OpKind::kReduce;
}
// All blocks of one size, or of sizes around it, some of them zero.
[[nodiscard]] std::vector<std::size_t> equal_counts(OpKind kind, int size, std::size_t count);
[[nodiscard]] std::vector<std::size_t> ragged_counts(OpKind kind, int size, std::size_t count,
                                                     std::uint64_t seed);

// A well-mixed number for any word: the tests' only source of chance.
[[nodiscard]] std::uint64_t mix(std::uint64_t word);

// A case of equal blocks whose further properties follow from `seed`.
[[nodiscard]] Case any_case(OpKind kind, DType dtype, ReduceOp op, int size, std::size_t count,
                            std::uint64_t seed);

using Bytes = std::shared_ptr<const std::vector<std::byte>>;

struct PreparedCase {
  Case what;
  int size = 1;
  std::vector<std::vector<Bytes>> inputs;   // by rank and block; none where the kind takes none
  std::vector<std::vector<Bytes>> outputs;  // what must come out
};

// `hosts`: where a reduction is first of the ranks of each host and then of the hosts, the host
// of each rank; otherwise empty.
[[nodiscard]] PreparedCase prepare(const Case& what, int size, SummationOrder order,
                                   const std::vector<int>& hosts = {});

// The factor of a rank in premul_sum.
[[nodiscard]] double premul_factor(int rank);

// The buffers of one rank for one case at a time. `heap` may be empty: then nothing lies there.
class CaseBuffers {
 public:
  explicit CaseBuffers(std::span<std::byte> heap) : heap_{heap.data(), heap.size(), 0, {}} {}
  CaseBuffers(const CaseBuffers&) = delete;
  CaseBuffers& operator=(const CaseBuffers&) = delete;

  // Lays the case out and fills the inputs in. The operation refers to the buffers.
  [[nodiscard]] Operation lay_out(const PreparedCase& prepared, int rank, Placement placement);

  // Compares everything with what it must be by now: outputs, inputs, and what lies between.
  // Returns what is wrong; empty if nothing.
  [[nodiscard]] std::string check() const;

 private:
  // Memory, and what it must hold once the case is over.
  struct Arena {
    std::byte* data = nullptr;
    std::size_t capacity = 0;
    std::size_t used = 0;
    std::vector<std::byte> expected;
  };
  struct Region {
    Arena* arena = nullptr;
    std::size_t offset = 0;
    std::string name;
  };

  [[nodiscard]] Region place(std::size_t bytes, std::size_t alignment, std::uint64_t chance,
                             Placement placement, const std::string& name);
  [[nodiscard]] Arena& arena_for(std::size_t bytes, std::uint64_t chance, Placement placement);

  std::vector<std::byte> storage_;
  Arena ordinary_;
  Arena heap_;
  std::vector<Region> regions_;
};

}  // namespace pydist::testing
