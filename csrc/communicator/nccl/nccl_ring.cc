#include "communicator/nccl/nccl_ring.h"

#include <algorithm>
#include <array>
#include <functional>

#include "collectives/float16_overflow.h"
#include "collectives/ring_schedule.h"
#include "collectives/slices.h"

namespace pydist {
namespace {

class RingOnNccl {
 public:
  RingOnNccl(NcclGroup& group, const CudaLibrary* kernels, const Call& call)
      : group_(group),
        kernels_(kernels),
        call_(call),
        op_(call.op),
        schedule_(group.rank(), group.size()),
        has_wire_(call.wire_dtype != call.dtype),
        partial_(summing_type(call)),
        own_factor_(call.factor) {
    if (is_scaled_mean(op_, partial_)) {
      const ScaledMean mean = scaled_mean(group.size());
      op_ = ReduceOp::kPremulSum;
      own_factor_ = mean.factor;
      last_factor_ = 1.0 / mean.divisor;
    }
  }

  void reduce_scatter() {
    const Scratch scratch = cut(/*gathers=*/false);
    std::size_t longest = 0;
    for (int slice = 0; slice < group_.size(); ++slice) {
      longest = std::max(longest, call_.inputs[slice].count);
    }
    for (std::size_t begin = 0; begin < longest; begin += scratch.capacity) {
      reduce_slices(scratch, call_.outputs[0].data + begin * size_of(call_.dtype),
                    [&](int slice) { return part(call_.inputs[slice], begin, scratch.capacity); });
    }
  }

  void all_reduce() {
    const Scratch scratch = cut(/*gathers=*/has_wire_);
    in_pieces(scratch, [&](const PlaceIn& place) {
      const auto input = [&](int slice) { return place(call_.inputs[0].data, slice); };
      const auto output = [&](int slice) { return place(call_.outputs[0].data, slice); };
      reduce_slices(scratch, output(group_.rank()).data, input);
      if (has_wire_) {
        gather_in_wire_type(scratch, output);
      } else {
        gather_slices(output, size_of(call_.dtype));
      }
    });
  }

  void reduce() {
    const Scratch scratch = cut(/*gathers=*/true);
    const bool is_root = group_.rank() == call_.root;
    in_pieces(scratch, [&](const PlaceIn& place) {
      const auto input = [&](int slice) { return place(call_.inputs[0].data, slice); };
      std::byte* const result =
          is_root ? place(call_.outputs[0].data, group_.rank()).data : scratch.gathered;
      reduce_slices(scratch, result, input);
      group_.grouped([&] {
        for (int slice = 0; slice < group_.size(); ++slice) {
          const std::size_t bytes = input(slice).count * size_of(call_.dtype);
          if (is_root && slice != call_.root) {
            receive_on_nccl(group_, place(call_.outputs[0].data, slice).data, bytes, slice);
          } else if (!is_root && slice == group_.rank()) {
            send_on_nccl(group_, result, bytes, call_.root);
          }
        }
      });
    });
  }

  void all_gather() {
    const Block own = call_.outputs[group_.rank()];
    if (own.data != call_.inputs[0].data) {
      cuda::Driver::get().copy(own.data, call_.inputs[0].data, own.count * size_of(call_.dtype),
                               group_.stream());
    }
    gather_slices([&](int slice) { return call_.outputs[slice]; }, size_of(call_.dtype));
  }

 private:
  using Place = std::function<Block(int slice)>;
  // Where a slice lies in a buffer that begins at `base`.
  using PlaceIn = std::function<Block(std::byte* base, int slice)>;

  // A slice has `capacity` elements at most.
  struct Scratch {
    std::size_t capacity;
    std::byte* sent;      // of the type of partial sums
    std::byte* received;  // likewise
    std::byte* gathered;  // a place for each rank's slice, of the call's type or the wire's
  };

  static std::size_t size_of(DType dtype) { return element_size(dtype); }

  [[nodiscard]] Block part(Block block, std::size_t begin, std::size_t capacity) const {
    begin = std::min(begin, block.count);
    return {block.data + begin * size_of(call_.dtype), std::min(capacity, block.count - begin)};
  }

  [[nodiscard]] Scratch cut(bool gathers) const {
    const auto ranks = static_cast<std::size_t>(group_.size());
    const std::size_t gathered = !gathers    ? 0
                                 : has_wire_ ? std::max(ranks * 2, size_of(call_.dtype))
                                             : size_of(call_.dtype);
    constexpr std::size_t kLine = 64;
    const std::size_t capacity =
        NcclGroup::kScratchBytes / (2 * size_of(partial_) + gathered) / kLine * kLine;
    std::byte* const base = group_.scratch();
    return {capacity, base, base + capacity * size_of(partial_),
            base + 2 * capacity * size_of(partial_)};
  }

  // Calls `piece` for as much of the buffer as fits, until it is done.
  void in_pieces(const Scratch& scratch,
                 const std::function<void(const PlaceIn& place)>& piece) const {
    // Slices of equal capacity; they are cut on cache lines, as the capacity is.
    const std::size_t most = scratch.capacity * static_cast<std::size_t>(group_.size());
    for (std::size_t begin = 0; begin < call_.count; begin += most) {
      const Slices slices(std::min(most, call_.count - begin), group_.size(), size_of(call_.dtype));
      piece([&](std::byte* base, int slice) {
        return Block{base + (begin + slices[slice].begin) * size_of(call_.dtype),
                     slices[slice].count};
      });
    }
  }

  // output = the input, or received and input, combined.
  void combine(const void* received, Block own, void* output, DType output_dtype, bool is_last) {
    const std::size_t first = received == nullptr ? 1 : 0;
    const std::array<const void*, 2> inputs{received, own.data};
    const std::array<DType, 2> dtypes{partial_, call_.dtype};
    const double factor = is_last ? last_factor_ : 1.0;
    const std::array<double, 2> factors{factor, factor * own_factor_};
    const bool divides = op_ == ReduceOp::kMean && is_last;
    kernels_->reduce(
        PydistCudaReduce{
            .inputs = inputs.data() + first,
            .input_dtypes = dtypes.data() + first,
            .factors = factors.data() + first,
            .output = output,
            .count = own.count,
            .divisor = divides ? static_cast<double>(group_.size()) : 1.0,
            .input_count = static_cast<std::uint32_t>(2 - first),
            .op = op_ == ReduceOp::kMean && !is_last ? ReduceOp::kSum : op_,
            .output_dtype = output_dtype,
            .wire_dtype = has_wire_ ? call_.wire_dtype : DType::kFloat32,
        },
        group_.stream());
  }

  // `result` = this rank's slice, combined over all ranks.
  void reduce_slices(const Scratch& scratch, std::byte* result, const Place& input) {
    const int rank = group_.rank();
    if (group_.size() == 1) {
      combine(nullptr, input(0), result, call_.dtype, /*is_last=*/true);
      return;
    }
    for (int step = 0; step < schedule_.steps(); ++step) {
      const int sent = schedule_.reduce_scatter_sends(step);
      const int received = schedule_.reduce_scatter_receives(step);
      const Block mine = input(sent);
      const void* outgoing = scratch.sent;
      if (step == 0) {
        if (partial_ == call_.dtype && op_ != ReduceOp::kPremulSum) {
          outgoing = mine.data;
        } else {
          combine(nullptr, mine, scratch.sent, partial_, /*is_last=*/false);
        }
      }
      const Block own = input(received);
      group_.grouped([&] {
        send_on_nccl(group_, outgoing, mine.count * size_of(partial_), schedule_.next());
        receive_on_nccl(group_, scratch.received, own.count * size_of(partial_),
                        schedule_.previous());
      });
      const bool is_last = received == rank;
      combine(scratch.received, own, is_last ? result : scratch.sent,
              is_last ? call_.dtype : partial_, is_last);
    }
  }

  // Every rank has its own slice in place, and gets the others'.
  void gather_slices(const Place& place, std::size_t element_bytes) {
    for (int step = 0; step < schedule_.steps(); ++step) {
      const Block sent = place(schedule_.all_gather_sends(step));
      const Block received = place(schedule_.all_gather_receives(step));
      group_.grouped([&] {
        send_on_nccl(group_, sent.data, sent.count * element_bytes, schedule_.next());
        receive_on_nccl(group_, received.data, received.count * element_bytes,
                        schedule_.previous());
      });
    }
  }

  void gather_in_wire_type(const Scratch& scratch, const Place& output) {
    const std::size_t bytes = size_of(call_.wire_dtype);
    const auto wire = [&](int slice) {
      return Block{scratch.gathered + static_cast<std::size_t>(slice) * scratch.capacity * bytes,
                   output(slice).count};
    };
    const int rank = group_.rank();
    convert(output(rank), call_.dtype, wire(rank).data, call_.wire_dtype);
    gather_slices(wire, bytes);
    for (int slice = 0; slice < group_.size(); ++slice) {
      if (slice != rank) {
        convert(wire(slice), call_.wire_dtype, output(slice).data, call_.dtype);
      }
    }
  }

  void convert(Block from, DType from_dtype, void* to, DType to_dtype) {
    const PydistCudaSegment segment{from.data, to, from.count, from_dtype, to_dtype};
    kernels_->convert(PydistCudaConvert{&segment, 1, 1.0}, group_.stream());
  }

  NcclGroup& group_;
  const CudaLibrary* const kernels_;
  const Call& call_;
  ReduceOp op_;
  const RingSchedule schedule_;
  const bool has_wire_;
  const DType partial_;  // the type that sums are in while they travel
  double own_factor_;
  double last_factor_ = 1.0;
};

}  // namespace

DType summing_type(const Call& call) noexcept {
  if (call.wire_dtype != call.dtype) {
    return call.wire_dtype;
  }
  return is_16_bit_float(call.dtype) ? DType::kFloat32 : call.dtype;
}

void send_on_nccl(NcclGroup& group, const void* data, std::size_t bytes, int to) {
  if (bytes != 0) {
    group.call("ncclSend", group.api().functions().ncclSend, data, bytes, nccl::DataType::kUint8,
               to);
  }
}

void receive_on_nccl(NcclGroup& group, void* data, std::size_t bytes, int from) {
  if (bytes != 0) {
    group.call("ncclRecv", group.api().functions().ncclRecv, data, bytes, nccl::DataType::kUint8,
               from);
  }
}

void reduce_on_ring(NcclGroup& group, const CudaLibrary& kernels, const Call& call) {
  RingOnNccl ring(group, &kernels, call);
  switch (call.kind) {
    case OpKind::kReduceScatter:
      ring.reduce_scatter();
      break;
    case OpKind::kReduce:
      ring.reduce();
      break;
    default:
      ring.all_reduce();
      break;
  }
}

void all_gather_on_ring(NcclGroup& group, const Call& call) {
  RingOnNccl(group, nullptr, call).all_gather();
}

}  // namespace pydist
