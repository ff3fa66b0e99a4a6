#include "communicator/operation.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/error.h"
#include "collectives/call.h"

namespace pydist {

namespace {

class Validator {
 public:
  Validator(const Operation& operation, int rank, int size)
      : operation_(operation), rank_(rank), size_(size) {}

  void run() const {
    const auto& in = operation_.inputs;
    const auto& out = operation_.outputs;
    const bool is_root = rank_ == operation_.peer;
    check_dtypes();
    check_wire_dtype();
    switch (operation_.kind) {
      case OpKind::kAllReduce:
        expect_one(in, "input");
        expect_one(out, "output");
        expect_equal(in[0].count, out[0].count);
        check_op();
        check_in_place(in[0], out[0]);
        break;
      case OpKind::kReduceScatter:
        expect_blocks(in, "inputs");
        expect_one(out, "output");
        expect_equal(block(in, rank_).count, out[0].count);
        check_op();
        check_own_block(in, out[0]);
        break;
      case OpKind::kAllGather:
        expect_one(in, "input");
        expect_blocks(out, "outputs");
        expect_equal(in[0].count, block(out, rank_).count);
        check_apart(out);
        check_own_block(out, in[0]);
        break;
      case OpKind::kBroadcast:
        check_peer();
        if (is_root) {
          expect_one(in, "input");
          if (!out.empty()) {
            expect_one(out, "output");
            expect_equal(in[0].count, out[0].count);
            check_in_place(in[0], out[0]);
          }
        } else {
          expect_one(out, "output");
        }
        break;
      case OpKind::kReduce:
        check_peer();
        expect_one(in, "input");
        if (is_root) {
          expect_one(out, "output");
          expect_equal(in[0].count, out[0].count);
          check_in_place(in[0], out[0]);
        }
        check_op();
        break;
      case OpKind::kGather:
        check_peer();
        expect_one(in, "input");
        if (is_root) {
          expect_blocks(out, "outputs");
          expect_equal(in[0].count, block(out, rank_).count);
          check_apart(out);
          check_own_block(out, in[0]);
        }
        break;
      case OpKind::kScatter:
        check_peer();
        expect_one(out, "output");
        if (is_root) {
          expect_blocks(in, "inputs");
          expect_equal(block(in, rank_).count, out[0].count);
          check_own_block(in, out[0]);
        }
        break;
      case OpKind::kAllToAll:
        expect_blocks(in, "inputs");
        expect_blocks(out, "outputs");
        expect_equal(block(in, rank_).count, block(out, rank_).count);
        check_apart(out);
        check_exchange(in, out);
        break;
      case OpKind::kSend:
        check_peer();
        expect_one(in, "input");
        break;
      case OpKind::kRecv:
        if (operation_.peer != kAnySource) {
          check_peer();
        }
        expect_one(out, "output");
        break;
      case OpKind::kBarrier:
      case OpKind::kAllocate:
        break;
    }
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw InvalidUsage(
        join(to_string(operation_.kind), " on rank ", rank_, " of ", size_, ": ", what));
  }

  void check_dtypes() const {
    const Buffer* first = nullptr;
    for (const auto* list : {&operation_.inputs, &operation_.outputs}) {
      for (const Buffer& buffer : *list) {
        if (first == nullptr) {
          first = &buffer;
        }
        if (buffer.dtype != first->dtype) {
          fail(join("all buffers must have one dtype, but they have ", to_string(first->dtype),
                    " and ", to_string(buffer.dtype), "."));
        }
        if (buffer.device != first->device) {
          fail("all buffers must be on one device.");
        }
        if (buffer.data == nullptr && buffer.count != 0) {
          fail("a buffer has elements but no memory.");
        }
      }
    }
  }

  void check_wire_dtype() const {
    if (!operation_.wire_dtype) {
      return;
    }
    const DType wire = *operation_.wire_dtype;
    const Buffer* const buffer = operation_.first_buffer();
    if (buffer != nullptr && wire == buffer->dtype) {
      return;
    }
    const ReduceOp op = operation_.op;
    const bool is_sum = op == ReduceOp::kSum || op == ReduceOp::kMean || op == ReduceOp::kPremulSum;
    const bool is_narrower =
        std::find(kWireDTypes.begin(), kWireDTypes.end(), wire) != kWireDTypes.end();
    if (!has_op(operation_.kind) || !is_sum || !is_narrower || buffer == nullptr ||
        buffer->dtype != DType::kFloat32) {
      std::string what = "the operation";
      if (buffer != nullptr) {
        what = has_op(operation_.kind) ? join("'", to_string(op), "' of ", to_string(buffer->dtype))
                                       : join("the ", to_string(buffer->dtype), " buffer");
      }
      fail(join(what, " cannot travel as ", to_string(wire),
                "; a wire type other than the buffers' own is for 'sum', 'mean' and 'premul_sum' "
                "of float32 in all_reduce, reduce_scatter and reduce, and is float16 or "
                "bfloat16."));
    }
  }

  void check_op() const {
    const DType dtype = operation_.inputs[0].dtype;
    if (!is_supported(operation_.op, dtype)) {
      fail(join("op '", to_string(operation_.op), "' is not defined for ", to_string(dtype), "."));
    }
  }

  void check_peer() const {
    if (operation_.peer < 0 || operation_.peer >= size_) {
      fail(join(is_point_to_point(operation_.kind) ? "peer " : "root ", operation_.peer,
                " is not a rank of the group; ranks are 0 to ", size_ - 1, "."));
    }
  }

  void expect_one(const Buffers& buffers, const char* what) const {
    if (buffers.size() != 1) {
      fail(join("expected one ", what, ", got ", buffers.size(), "."));
    }
  }

  void expect_blocks(const Buffers& buffers, const char* what) const {
    const auto size = static_cast<std::size_t>(size_);
    if (buffers.size() == 1) {
      if (buffers[0].count % size != 0) {
        fail(join("one buffer for all ranks must hold equal blocks, but its ", buffers[0].count,
                  " elements cannot be divided by ", size_, " ranks."));
      }
    } else if (buffers.size() != size) {
      fail(join("expected one buffer or ", size_, " ", what, ", got ", buffers.size(), "."));
    }
  }

  [[nodiscard]] Buffer block(const Buffers& buffers, int rank) const {
    const Block its = Blocks(buffers, size_)[rank];
    return {its.data, its.count, buffers[0].dtype, buffers[0].device};
  }

  void expect_equal(std::size_t input_count, std::size_t output_count) const {
    if (input_count != output_count) {
      fail(join("this rank's input has ", input_count, " elements, but its output has place for ",
                output_count, "."));
    }
  }

  static bool overlap(const Buffer& a, const Buffer& b) {
    const auto begin_of = [](const Buffer& buffer) {
      return reinterpret_cast<std::uintptr_t>(buffer.data);
    };
    return a.count != 0 && b.count != 0 && begin_of(a) < begin_of(b) + b.bytes() &&
           begin_of(b) < begin_of(a) + a.bytes();
  }

  [[noreturn]] void fail_overlap() const {
    fail(
        "an input and an output overlap in memory without being the same elements; pass an output "
        "of its own, or exactly the place that the result belongs to.");
  }

  void check_in_place(const Buffer& input, const Buffer& output) const {
    if (input.data != output.data && overlap(input, output)) {
      fail_overlap();
    }
  }

  // `buffer` lies apart from all blocks, or exactly where this rank's block does.
  void check_own_block(const Buffers& blocks, const Buffer& buffer) const {
    for (int rank = 0; rank < size_; ++rank) {
      const Buffer place = block(blocks, rank);
      if (overlap(place, buffer) && (rank != rank_ || place.data != buffer.data)) {
        fail_overlap();
      }
    }
  }

  // No two outputs share memory.
  void check_apart(const Buffers& outputs) const {
    std::vector<const Buffer*> sorted;
    for (const Buffer& output : outputs) {
      if (output.count != 0) {
        sorted.push_back(&output);
      }
    }
    std::sort(sorted.begin(), sorted.end(),
              [](const Buffer* a, const Buffer* b) { return std::less<>()(a->data, b->data); });
    for (std::size_t i = 1; i < sorted.size(); ++i) {
      if (overlap(*sorted[i - 1], *sorted[i])) {
        fail("two outputs overlap in memory, so one result would overwrite another.");
      }
    }
  }

  // What comes from a rank may take the place of what goes to it; otherwise inputs and outputs lie
  // apart.
  void check_exchange(const Buffers& in, const Buffers& out) const {
    const auto touch = [](const Buffers& a, const Buffers& b) {
      return std::any_of(a.begin(), a.end(), [&b](const Buffer& x) {
        return std::any_of(b.begin(), b.end(), [&x](const Buffer& y) { return overlap(x, y); });
      });
    };
    if (!touch(in, out)) {
      return;
    }
    for (int to = 0; to < size_; ++to) {
      for (int from = 0; from < size_; ++from) {
        const Buffer input = block(in, to);
        const Buffer output = block(out, from);
        const bool is_in_place =
            to == from && input.data == output.data && input.count == output.count;
        if (overlap(input, output) && !is_in_place) {
          fail_overlap();
        }
      }
    }
  }

  const Operation& operation_;
  int rank_;
  int size_;
};

// Whether this is an all_reduce in place with nothing wrong or unusual about it. It may take a
// tenth of a microsecond in all.
bool is_usual(const Operation& operation) {
  if (operation.kind != OpKind::kAllReduce || operation.wire_dtype ||
      operation.inputs.size() != 1 || operation.outputs.size() != 1) {
    return false;
  }
  const Buffer& in = operation.inputs[0];
  const Buffer& out = operation.outputs[0];
  return in.data != nullptr && in.data == out.data && in.count == out.count &&
         in.dtype == out.dtype && in.device == out.device && is_supported(operation.op, in.dtype);
}

}  // namespace

void validate(const Operation& operation, int rank, int size) {
  if (is_usual(operation)) [[likely]] {
    return;
  }
  Validator(operation, rank, size).run();
}

}  // namespace pydist
