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
  bool reduces;
  bool gathers;
  SendChannel& next;
  ReceiveChannel& previous;

  // Turns in which a rank receives: first those that reduce, then those that gather.
  [[nodiscard]] int reducing_turns() const { return reduces ? schedule.steps() : 0; }
  [[nodiscard]] int turns() const { return reducing_turns() + (gathers ? schedule.steps() : 0); }

  [[nodiscard]] Block part(const Block& chunk, Segment segment) const {
    const Slice slice = segment.of(chunk.count);
    return {chunk.data + slice.begin * element_bytes, slice.count};
  }
  [[nodiscard]] Block own_of(int chunk, Segment segment) const {
    return part(chunks.input(chunk), segment);
  }
  // Where the elements of a finished chunk go, of which this rank's may be all that it has.
  [[nodiscard]] Block place_of(int chunk, Segment segment) const {
    return part(gathers ? chunks.output(chunk) : chunks.call.outputs[0], segment);
  }
  // Sends finished elements, which stay as they are until the end.
  void send_finished(int chunk, Segment segment) {
    const Block finished = place_of(chunk, segment);
    if (wire.converts()) {
      wire.put(next.slot(), finished.data, finished.count);
      next.send(wire.bytes(finished.count));
    } else {
      next.send_from(finished.data, wire.bytes(finished.count));
    }
  }
  // What has come, which is `bytes` long.
  [[nodiscard]] const std::byte* received(std::size_t bytes) {
    const std::span<const std::byte> slot = previous.slot();
    PYDIST_CHECK(slot.size() == bytes);
    return slot.data();
  }
};

// The rank's part in one turn of a segment: takes what has come, and sends what that becomes,
// unless it is the last turn. Precondition: something has come, and there is a free slot.
void take_turn(Ring& ring, const PartialSums& sums, int turn, Segment segment) {
  if (turn + 1 < ring.reducing_turns()) {
    const Block own = ring.own_of(ring.schedule.reduce_scatter_receives(turn), segment);
    sums.add(turn, ring.next.slot(), ring.received(sums.bytes(own.count)), own.data, own.count);
    ring.next.send(sums.bytes(own.count));
    ring.previous.release();
    return;
  }
  int chunk = 0;
  if (turn < ring.reducing_turns()) {
    chunk = ring.schedule.reduce_scatter_receives(turn);
    const Block own = ring.own_of(chunk, segment);
    sums.finish(turn, ring.place_of(chunk, segment).data, ring.received(sums.bytes(own.count)),
                own.data, own.count);
  } else {
    chunk = ring.schedule.all_gather_receives(turn - ring.reducing_turns());
    const Block place = ring.place_of(chunk, segment);
    ring.wire.take(place.data, ring.received(ring.wire.bytes(place.count)), place.count);
  }
  ring.previous.release();
  if (turn + 1 < ring.turns()) {
    ring.send_finished(chunk, segment);
  }
}

// Note [A window of segments]
// Several segments go round at a time, so that a rank works on one while others are on their way.
// They take turns in one order, on all ranks. Each rank sends `count` of them ahead and then one
// for each that it has received. With one slot more than that in each channel nobody waits in a
// circle: not all channels can be full at the same time.
Task pass_segments(Ring& ring, const PartialSums& sums, std::size_t first, std::size_t count,
                   std::size_t elements) {
  for (std::size_t index = first; index < first + count; ++index) {
    const Segment segment(index, elements);
    co_await ring.next.until_free();
    if (ring.reduces) {
      const Block own = ring.own_of(ring.schedule.reduce_scatter_sends(0), segment);
      sums.start(ring.next.slot(), own.data, own.count);
      ring.next.send(sums.bytes(own.count));
    } else {
      ring.send_finished(ring.schedule.all_gather_sends(0), segment);
    }
  }
  for (int turn = 0; turn < ring.turns(); ++turn) {
    for (std::size_t index = first; index < first + count; ++index) {
      co_await ring.previous.until_received();
      if (turn + 1 < ring.turns()) {
        co_await ring.next.until_free();
      }
      take_turn(ring, sums, turn, Segment(index, elements));
    }
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

Task run_ring(Group& group, Call call, SendChannel& next, ReceiveChannel& previous,
              std::size_t segment_bytes) {
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
            call.kind != OpKind::kAllGather,
            call.kind != OpKind::kReduceScatter,
            next,
            previous};
  const PartialSums sums(group, call, ring.schedule.previous());
  if (!ring.reduces) {
    const Block own = ring.chunks.output(group.rank());
    if (own.count != 0 && own.data != call.inputs[0].data) {
      std::memcpy(own.data, call.inputs[0].data, own.count * ring.element_bytes);
    }
  }
  const std::size_t per_segment =
      segment_bytes / (ring.reduces ? sums.bytes(1) : ring.wire.bytes(1));
  PYDIST_CHECK(next.window() > 0);
  const std::size_t segments = (ring.chunks.largest() + per_segment - 1) / per_segment;
  for (std::size_t first = 0; first < segments; first += next.window()) {
    const std::size_t count = std::min(next.window(), segments - first);
    co_await pass_segments(ring, sums, first, count, per_segment);
  }
  // The slots may be transit for whatever comes next.
  co_await next.until_reusable();
  group.complete();
}

}  // namespace pydist
