// The reads and writes that a collective on one host can't do without, and nothing else: no rank
// waits for another. What an algorithm is held against.
//
// The buffers of all ranks are addressed directly, so they lie in memory that all ranks share; what
// they hold afterwards means something only where nobody else was at work on them. The work is
// divided among the ranks as the algorithms on the symmetric heap divide it. Bytes moved by all p
// ranks together, for s bytes (of the whole buffer, as `count` says):
//
//   all_reduce            2ps   each slice is read from p buffers, and written to p
//   reduce_scatter, reduce (p+1)s
//   all_gather            2ps   (2(p-1)s in place)
//   broadcast             2(p-1)s
//   gather, scatter       2s
//   all_to_all, send      2ps   send: every rank to the next one, all at once
//   barrier               nothing
//
// Immutable; run() may be called from any thread.

#pragma once

#include <cstddef>
#include <vector>

#include "base/dtype.h"
#include "base/op_kind.h"
#include "base/reduce_op.h"
#include "kernels/cpu/reduce.h"

namespace pydist {

class Roofline {
 public:
  struct Case {
    OpKind kind = OpKind::kBarrier;
    DType dtype = DType::kFloat32;
    ReduceOp op = ReduceOp::kSum;
    int rank = 0;
    int root = 0;
    // Elements of the buffer for all_reduce, broadcast, reduce and send; otherwise of one block.
    std::size_t count = 0;
    // Of each rank, as this process addresses them. In place where they are the same, or one lies
    // in the other at its rank's block.
    std::vector<std::byte*> inputs;
    std::vector<std::byte*> outputs;
  };

  // Throws InvalidUsage unless there is an input and an output for each of one or more ranks.
  explicit Roofline(const Case& all);

  // This rank's share, once.
  void run() const;

 private:
  struct Copy {
    std::byte* target;
    const std::byte* source;
    std::size_t bytes;
  };

  void add_copy(std::byte* target, const std::byte* source, std::size_t bytes);
  void add_sources(const std::vector<std::byte*>& inputs, std::size_t offset);

  Reduction reduction_;
  StoreHint hint_;
  std::vector<double> factors_;
  // Of the reduction; none for kinds that only copy.
  std::vector<const void*> sources_;
  std::vector<void*> targets_;
  std::size_t reduced_ = 0;  // elements
  std::vector<Copy> copies_;
};

}  // namespace pydist
