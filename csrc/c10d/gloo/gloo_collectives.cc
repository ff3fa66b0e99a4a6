#include "c10d/gloo/gloo_collectives.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <vector>

#include "base/error.h"
#include "collectives/call.h"
#include "communicator/operation_call.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/reduce.h"

namespace pydist {
namespace {

// What a gathered reduction holds at a time, for all ranks together.
constexpr std::size_t kGatheredBytes = std::size_t{8} << 20;
constexpr std::uint64_t kBlockTag = GlooChannel::kUserTags;

using Scratch = std::unique_ptr<std::byte[]>;

Scratch make_scratch(std::size_t bytes) {
  return std::make_unique_for_overwrite<std::byte[]>(std::max(bytes, std::size_t{1}));
}

void copy_memory(void* output, const void* input, std::size_t bytes) {
  if (output != input && bytes != 0) {
    std::memcpy(output, input, bytes);
  }
}

// The blocks of a collective as one run of memory each: of one buffer, or of one for each rank.
class BlockRuns {
 public:
  BlockRuns(const Buffers& buffers, int size) {
    const Blocks blocks(buffers, size);
    for (int rank = 0; rank < size; ++rank) {
      const Block block = blocks[rank];
      is_contiguous_ &= rank == 0 || end_of(blocks_.back()) == block.data;
      blocks_.push_back({block.data, block.count, buffers[0].dtype});
      bytes_ += blocks_.back().bytes();
      is_equal_ &= block.count == blocks_[0].count;
    }
  }

  [[nodiscard]] const Buffer& operator[](std::size_t i) const { return blocks_[i]; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] bool is_contiguous() const { return is_contiguous_; }
  [[nodiscard]] bool is_equal() const { return is_equal_; }

  void pack(std::byte* packed) const {
    for (const Buffer& block : blocks_) {
      copy_memory(packed, block.data, block.bytes());
      packed += block.bytes();
    }
  }

  void unpack(const std::byte* packed) const {
    for (const Buffer& block : blocks_) {
      copy_memory(block.data, packed, block.bytes());
      packed += block.bytes();
    }
  }

  [[nodiscard]] std::vector<std::int64_t> block_bytes() const {
    std::vector<std::int64_t> bytes;
    for (const Buffer& block : blocks_) {
      bytes.push_back(static_cast<std::int64_t>(block.bytes()));
    }
    return bytes;
  }

 private:
  static void* end_of(const Buffer& buffer) {
    return static_cast<std::byte*>(buffer.data) + buffer.bytes();
  }

  std::vector<Buffer> blocks_;
  std::size_t bytes_ = 0;
  bool is_contiguous_ = true;
  bool is_equal_ = true;
};

class Runner {
 public:
  Runner(GlooChannel& channel, const Operation& operation, Deadline deadline)
      : channel_(channel),
        operation_(operation),
        deadline_(deadline),
        rank_(static_cast<std::size_t>(channel.rank())),
        size_(static_cast<std::size_t>(channel.size())) {}

  void run() {
    switch (operation_.kind) {
      case OpKind::kAllReduce:
        combine(operation_.inputs[0].data, operation_.outputs[0].data, operation_.inputs[0].count);
        break;
      case OpKind::kReduceScatter:
        reduce_scatter();
        break;
      case OpKind::kAllGather:
        all_gather();
        break;
      case OpKind::kBroadcast:
        broadcast();
        break;
      case OpKind::kReduce:
        reduce_to_root();
        break;
      case OpKind::kGather:
      case OpKind::kScatter:
        exchange_with_root();
        break;
      case OpKind::kAllToAll:
        all_to_all();
        break;
      case OpKind::kBarrier:
        channel_.barrier(deadline_);
        break;
      default:
        PYDIST_CHECK(false);
    }
  }

 private:
  [[nodiscard]] bool is_root() const { return channel_.rank() == operation_.peer; }

  // output = the elements of all ranks' inputs combined; `output` may be `input`.
  void combine(const void* input, void* output, std::size_t count) {
    const DType dtype = operation_.inputs[0].dtype;
    const ReduceOp op = operation_.op;
    const bool is_sum = op == ReduceOp::kSum || op == ReduceOp::kMean || op == ReduceOp::kPremulSum;
    if (operation_.wire_dtype.value_or(dtype) != dtype) {
      combine_on_wire(static_cast<const float*>(input), static_cast<float*>(output), count,
                      *operation_.wire_dtype);
    } else if (is_sum && is_16_bit_float(dtype)) {
      const Scratch scratch = make_scratch(count * sizeof(float));
      auto* const wide = reinterpret_cast<float*>(scratch.get());
      widen_to_float32(dtype, input, wide, count);
      sum(wide, count, DType::kFloat32);
      narrow_from_float32(dtype, wide, output, count);
    } else if (is_sum && GlooChannel::can_sum(dtype)) {
      copy_memory(output, input, count * element_size(dtype));
      sum(output, count, dtype);
    } else {
      gather_and_reduce(input, output, count, dtype);
    }
  }

  // In place, for a type that gloo sums.
  void sum(void* data, std::size_t count, DType dtype) {
    if (operation_.op == ReduceOp::kPremulSum) {
      const std::array factor{operation_.factor};
      apply({.dtype = dtype, .op = ReduceOp::kPremulSum, .factors = factor}, data, count);
    }
    channel_.all_reduce_sum(data, count, dtype, deadline_);
    if (operation_.op == ReduceOp::kMean) {
      apply({.dtype = dtype, .op = ReduceOp::kMean, .divisor = static_cast<double>(size_)}, data,
            count);
    }
  }

  static void apply(const Reduction& reduction, void* data, std::size_t count) {
    const std::array<const void*, 1> inputs{data};
    const std::array<void*, 1> outputs{data};
    reduce(reduction, inputs, outputs, count);
  }

  void gather_and_reduce(const void* input, void* output, std::size_t count, DType dtype) {
    const std::size_t element = element_size(dtype);
    const std::size_t chunk =
        std::min(count, std::max(kGatheredBytes / (size_ * element), std::size_t{1}));
    const Scratch gathered = make_scratch(chunk * size_ * element);
    const Reduction reduction{
        .dtype = dtype, .op = operation_.op, .divisor = static_cast<double>(size_)};
    for (std::size_t start = 0; start < count; start += chunk) {
      const std::size_t n = std::min(chunk, count - start);
      const std::size_t offset = start * element;
      channel_.all_gather(static_cast<const std::byte*>(input) + offset, gathered.get(),
                          n * element, deadline_);
      std::vector<const void*> inputs;
      for (std::size_t rank = 0; rank < size_; ++rank) {
        inputs.push_back(gathered.get() + rank * n * element);
      }
      const std::array<void*, 1> outputs{static_cast<std::byte*>(output) + offset};
      reduce(reduction, inputs, outputs, n);
    }
  }

  // In a 16-bit type, which gloo cannot carry and sum in float32 as well: each rank gets its block
  // of what everybody contributes, combines it in rank order, and everybody gathers the blocks.
  void combine_on_wire(const float* input, float* output, std::size_t count, DType wire) {
    const std::size_t element = element_size(wire);
    std::vector<double> factors(size_, 1.0);
    if (operation_.op == ReduceOp::kPremulSum) {
      channel_.all_gather(&operation_.factor, factors.data(), sizeof factors[0], deadline_);
    }
    const Reduction reduction{.dtype = wire,
                              .op = operation_.op,
                              .divisor = static_cast<double>(size_),
                              .factors = factors};
    const auto block_of = [this](std::size_t n) { return (n + size_ - 1) / size_; };
    const std::size_t chunk = std::min(count, kGatheredBytes / element);
    const Scratch whole = make_scratch(block_of(chunk) * size_ * element);
    const Scratch received = make_scratch(block_of(chunk) * size_ * element);
    for (std::size_t start = 0; start < count; start += chunk) {
      const std::size_t n = std::min(chunk, count - start);
      const std::size_t block_bytes = block_of(n) * element;
      narrow_from_float32(wire, input + start, whole.get(), n);
      std::memset(whole.get() + n * element, 0, block_bytes * size_ - n * element);
      const std::vector<std::int64_t> equal(size_, static_cast<std::int64_t>(block_bytes));
      channel_.all_to_all(whole.get(), equal, received.get(), equal, deadline_);
      std::vector<const void*> inputs;
      for (std::size_t rank = 0; rank < size_; ++rank) {
        inputs.push_back(received.get() + rank * block_bytes);
      }
      std::byte* const own = whole.get() + rank_ * block_bytes;
      const std::array<void*, 1> outputs{own};
      reduce(reduction, inputs, outputs, block_of(n));
      channel_.all_gather(own, whole.get(), block_bytes, deadline_);
      widen_to_float32(wire, whole.get(), output + start, n);
    }
  }

  void reduce_scatter() {
    const BlockRuns blocks(operation_.inputs, channel_.size());
    const Scratch packed = make_scratch(blocks.bytes());
    blocks.pack(packed.get());
    combine(packed.get(), packed.get(), blocks.bytes() / element_size(blocks[0].dtype));
    const std::byte* own = packed.get();
    for (std::size_t i = 0; i < rank_; ++i) {
      own += blocks[i].bytes();
    }
    copy_memory(operation_.outputs[0].data, own, blocks[rank_].bytes());
  }

  void reduce_to_root() {
    const Buffer& input = operation_.inputs[0];
    if (is_root()) {
      combine(input.data, operation_.outputs[0].data, input.count);
    } else {
      const Scratch scratch = make_scratch(input.bytes());
      combine(input.data, scratch.get(), input.count);
    }
  }

  void all_gather() {
    const Buffer& input = operation_.inputs[0];
    const BlockRuns blocks(operation_.outputs, channel_.size());
    if (!blocks.is_equal()) {
      copy_memory(blocks[rank_].data, input.data, input.bytes());
      for (std::size_t root = 0; root < size_; ++root) {
        channel_.broadcast(blocks[root].data, blocks[root].bytes(), static_cast<int>(root),
                           deadline_);
      }
    } else if (blocks.is_contiguous()) {
      channel_.all_gather(input.data, blocks[0].data, input.bytes(), deadline_);
    } else {
      const Scratch packed = make_scratch(blocks.bytes());
      channel_.all_gather(input.data, packed.get(), input.bytes(), deadline_);
      blocks.unpack(packed.get());
    }
  }

  void broadcast() {
    if (!is_root()) {
      channel_.broadcast(operation_.outputs[0].data, operation_.outputs[0].bytes(), operation_.peer,
                         deadline_);
      return;
    }
    const Buffer& input = operation_.inputs[0];
    channel_.broadcast(input.data, input.bytes(), operation_.peer, deadline_);
    if (!operation_.outputs.empty()) {
      copy_memory(operation_.outputs[0].data, input.data, input.bytes());
    }
  }

  void exchange_with_root() {
    const Call call = resolve(operation_, channel_.rank(), channel_.size());
    const std::size_t element = element_size(call.dtype);
    std::vector<GlooChannel::Message> messages;
    for (int peer = 0; peer < channel_.size(); ++peer) {
      const Block out = call.sent_to(peer);
      const Block in = call.received_from(peer);
      if (peer == channel_.rank()) {
        copy_memory(in.data, out.data, in.count * element);
        continue;
      }
      if (out.count != 0) {
        messages.push_back(channel_.post_send(out.data, out.count * element, peer, kBlockTag));
      }
      if (in.count != 0) {
        messages.push_back(channel_.post_recv(in.data, in.count * element, peer, kBlockTag));
      }
    }
    finish_all(messages);
  }

  void all_to_all() {
    const BlockRuns in(operation_.inputs, channel_.size());
    const BlockRuns out(operation_.outputs, channel_.size());
    // Packed wherever one lies in the other's place: gloo sends while it receives.
    const bool in_place = in[0].data == out[0].data;
    Scratch packed_in;
    const void* source = in[0].data;
    if (!in.is_contiguous() || in_place) {
      packed_in = make_scratch(in.bytes());
      in.pack(packed_in.get());
      source = packed_in.get();
    }
    Scratch packed_out;
    void* target = out[0].data;
    if (!out.is_contiguous()) {
      packed_out = make_scratch(out.bytes());
      target = packed_out.get();
    }
    channel_.all_to_all(source, in.block_bytes(), target, out.block_bytes(), deadline_);
    if (packed_out != nullptr) {
      out.unpack(packed_out.get());
    }
  }

  void finish_all(const std::vector<GlooChannel::Message>& messages) {
    // Every message is seen to its end, also after a failure: gloo may still write the memory.
    std::exception_ptr first;
    for (const GlooChannel::Message& message : messages) {
      try {
        GlooChannel::finish(message, deadline_);
      } catch (const Error&) {
        first = first == nullptr ? std::current_exception() : first;
      }
    }
    rethrow_if_any(first);
  }

  GlooChannel& channel_;
  const Operation& operation_;
  const Deadline deadline_;
  const std::size_t rank_;
  const std::size_t size_;
};

}  // namespace

void run_gloo_collective(GlooChannel& channel, const Operation& operation, Deadline deadline) {
  Runner(channel, operation, deadline).run();
}

}  // namespace pydist
