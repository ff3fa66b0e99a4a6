#include "collectives/ring.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "collectives/call_mismatch.h"
#include "collectives/float16_overflow.h"
#include "collectives/ring_schedule.h"
#include "collectives/slices.h"
#include "collectives/wire.h"

namespace pydist {
namespace {

// Partial sums travel in the type that the caller asks for, and otherwise so that the result alone
// is rounded to the buffers' type.
DType partial_dtype(const Call& call) {
  if (call.wire_dtype != call.dtype) {
    return call.wire_dtype;
  }
  return is_16_bit_float(call.dtype) ? DType::kFloat32 : call.dtype;
}

// Partial sums: a rank adds its own contribution to the sum that it received.
class PartialSums {
 public:
  // Once all have posted.
  PartialSums(const Group& group, const Call& call, int previous)
      : op_(call.op),
        size_(group.size()),
        wire_(call.dtype, partial_dtype(call)),
        own_factor_(call.factor),
        previous_factor_(group.detail(previous).factor) {
    if (is_scaled_mean(op_, partial_dtype(call))) {
      const ScaledMean mean = scaled_mean(size_);
      op_ = ReduceOp::kPremulSum;
      own_factor_ = previous_factor_ = mean.factor;
      last_factor_ = 1.0 / mean.divisor;
    }
  }

  [[nodiscard]] std::size_t bytes(std::size_t count) const { return wire_.bytes(count); }

  // slot = own. Not yet multiplied by the factor of premul_sum: what travels first is a
  // contribution, rounded as such, whatever the algorithm.
  void start(std::byte* slot, const std::byte* own, std::size_t count) const {
    wire_.put(slot, own, count);
  }

  // slot = received + own, in the given step.
  void add(int step, std::byte* slot, const std::byte* received, const std::byte* own,
           std::size_t count) const {
    // A mean is a sum until the last step.
    combine(step, op_ == ReduceOp::kMean ? ReduceOp::kSum : op_, 1.0, received, own, slot, nullptr,
            count);
  }

  // output = the finished sum of received and own.
  void finish(int step, std::byte* output, const std::byte* received, const std::byte* own,
              std::size_t count) const {
    combine(step, op_, last_factor_, received, own, nullptr, output, count);
  }

 private:
  void combine(int step, ReduceOp op, double factor, const std::byte* received,
               const std::byte* own, std::byte* slot, std::byte* output, std::size_t count) const {
    std::array<const void*, 2> pieces{received, own};
    const std::array<double, 2> factors{factor * (step == 0 ? previous_factor_ : 1.0),
                                        factor * own_factor_};
    wire_.combine({wire_.dtype(), op, static_cast<double>(size_), factors}, pieces, /*own=*/1, slot,
                  output, count);
  }

  ReduceOp op_;
  int size_;
  Wire wire_;
  double own_factor_;
  double previous_factor_;
  double last_factor_ = 1.0;
};

// A part of every rank's chunk: where segment `index` of each lies.
class Segment {
 public:
  Segment(std::size_t index, std::size_t elements) : begin_(index * elements), most_(elements) {}

  [[nodiscard]] Slice of(std::size_t chunk_count) const {
    const std::size_t begin = std::min(begin_, chunk_count);
    return {begin, std::min(most_, chunk_count - begin)};
  }

 private:
  std::size_t begin_;
  std::size_t most_;
};

// The chunk of each rank, as it lies in this rank's buffers.
struct Chunks {
  const Call& call;
  int size;

  [[nodiscard]] Block input(int rank) const { return chunk(call.inputs, rank); }
  [[nodiscard]] Block output(int rank) const { return chunk(call.outputs, rank); }

  [[nodiscard]] std::size_t largest() const {
    std::size_t largest = 0;
    for (int rank = 0; rank < size; ++rank) {
      largest = std::max(largest,
                         call.kind == OpKind::kAllGather ? output(rank).count : input(rank).count);
    }
    return largest;
  }

 private:
  // all_reduce cuts its one buffer itself; the other kinds come in blocks.
  [[nodiscard]] Block chunk(const Blocks& blocks, int rank) const {
    if (call.kind != OpKind::kAllReduce) {
      return blocks[rank];
    }
    const Block whole = blocks[0];
    const std::size_t bytes = element_size(call.dtype);
    const Slice slice = Slices(whole.count, size, bytes)[rank];
    return {whole.data + slice.begin * bytes, slice.count};
  }
};

struct Ring {
  RingSchedule schedule;
  Chunks chunks;
  std::size_t element_bytes;  // in the buffers
  Wire wire;                  // of finished elements
  SendChannel& next;
  ReceiveChannel& previous;
};

Task reduce_scatter_segment(Ring& ring, const PartialSums& sums, Segment segment, int me) {
  const auto own = [&](int rank) {
    const Block chunk = ring.chunks.input(rank);
    const Slice part = segment.of(chunk.count);
    return Block{chunk.data + part.begin * ring.element_bytes, part.count};
  };
  const Block first = own(ring.schedule.reduce_scatter_sends(0));
  co_await ring.next.until_free();
  sums.start(ring.next.slot(), first.data, first.count);
  ring.next.send(sums.bytes(first.count));

  for (int step = 0; step < ring.schedule.steps(); ++step) {
    const Block mine = own(ring.schedule.reduce_scatter_receives(step));
    co_await ring.previous.until_received();
    if (step + 1 < ring.schedule.steps()) {
      co_await ring.next.until_free();
      sums.add(step, ring.next.slot(), ring.previous.slot(), mine.data, mine.count);
      ring.next.send(sums.bytes(mine.count));
    } else {
      const Block all = ring.chunks.call.kind == OpKind::kReduceScatter
                            ? ring.chunks.call.outputs[0]
                            : ring.chunks.output(me);
      const Slice part = segment.of(all.count);
      sums.finish(step, all.data + part.begin * ring.element_bytes, ring.previous.slot(), mine.data,
                  mine.count);
    }
    ring.previous.release();
  }
}

Task all_gather_segment(Ring& ring, Segment segment) {
  const auto place = [&](int rank) {
    const Block chunk = ring.chunks.output(rank);
    const Slice part = segment.of(chunk.count);
    return Block{chunk.data + part.begin * ring.element_bytes, part.count};
  };
  for (int step = 0; step < ring.schedule.steps(); ++step) {
    const Block sent = place(ring.schedule.all_gather_sends(step));
    co_await ring.next.until_free();
    ring.wire.put(ring.next.slot(), sent.data, sent.count);
    ring.next.send(ring.wire.bytes(sent.count));

    const Block received = place(ring.schedule.all_gather_receives(step));
    co_await ring.previous.until_received();
    ring.wire.take(received.data, ring.previous.slot(), received.count);
    ring.previous.release();
  }
}

// A ring of one.
void run_alone(const Call& call) {
  const Block input = call.inputs[0];
  const Block output = call.outputs[0];
  const Wire wire(call.dtype, call.wire_dtype);
  if (has_op(call.kind)) {
    const void* piece = input.data;
    wire.combine({wire.dtype(), call.op, 1.0, {&call.factor, 1}}, {&piece, 1}, /*own=*/0, nullptr,
                 output.data, input.count);
  } else if (input.data != output.data) {
    wire.take(output.data, input.data, input.count);
  }
}

}  // namespace

Task run_ring(Group& group, Call call, SendChannel& next, ReceiveChannel& previous) {
  co_await group.may_post();
  describe_call(group, call);
  group.publish_post();
  co_await group.posted_by_all();
  group.note_all_posted();
  check_agreement(group, call, 0, group.size());

  if (group.size() == 1) {
    run_alone(call);
    group.complete();
    co_return;
  }
  // The channel to the next rank lies in this rank's transit.
  group.prepare_transit();
  Ring ring{RingSchedule(group.rank(), group.size()),
            Chunks{call, group.size()},
            element_size(call.dtype),
            Wire(call.dtype, call.wire_dtype),
            next,
            previous};
  const PartialSums sums(group, call, ring.schedule.previous());
  const bool gathers_only = call.kind == OpKind::kAllGather;
  if (gathers_only) {
    const Block own = ring.chunks.output(group.rank());
    if (own.count != 0 && own.data != call.inputs[0].data) {
      std::memcpy(own.data, call.inputs[0].data, own.count * ring.element_bytes);
    }
  }
  const std::size_t per_segment =
      next.slot_bytes() / (gathers_only ? ring.wire.bytes(1) : sums.bytes(1));
  const std::size_t segments = (ring.chunks.largest() + per_segment - 1) / per_segment;
  for (std::size_t index = 0; index < segments; ++index) {
    const Segment segment(index, per_segment);
    if (!gathers_only) {
      co_await reduce_scatter_segment(ring, sums, segment, group.rank());
    }
    if (call.kind != OpKind::kReduceScatter) {
      co_await all_gather_segment(ring, segment);
    }
  }
  // The slots are transit for whatever comes next.
  co_await next.until_drained();
  group.complete();
}

}  // namespace pydist
