#include "collectives/ring.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "collectives/fingerprint.h"
#include "collectives/ring_schedule.h"
#include "collectives/slices.h"
#include "kernels/convert_cpu.h"
#include "kernels/reduce_cpu.h"

namespace pydist {
namespace {

bool is_short_float(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

// One operand of a sum, and the arithmetic of partial sums. `partial` is the type that travels.
class PartialSums {
 public:
  explicit PartialSums(const Call& call, int size)
      : call_(call),
        size_(size),
        partial_(is_short_float(call.dtype) ? DType::kFloat32 : call.dtype) {}

  [[nodiscard]] std::size_t partial_bytes() const { return element_size(partial_); }

  // target = own, as a partial sum.
  void start(std::byte* target, const std::byte* own, std::size_t count) {
    const std::byte* operand = prepare(own, count);
    if (count != 0) {
      std::memcpy(target, operand, count * partial_bytes());
    }
  }

  // target = received + own.
  void add(std::byte* target, const std::byte* received, const std::byte* own, std::size_t count) {
    combine(plain_op(), target, received, prepare(own, count), count);
  }

  // target = the finished sum of received and own, in the type of the call.
  void finish(std::byte* target, const std::byte* received, const std::byte* own,
              std::size_t count) {
    const ReduceOp op = call_.op == ReduceOp::kMean ? ReduceOp::kMean : plain_op();
    const std::byte* operand = prepare(own, count);
    if (!is_short_float(call_.dtype)) {
      combine(op, target, received, operand, count);
      return;
    }
    finished_.resize(count);
    combine(op, reinterpret_cast<std::byte*>(finished_.data()), received, operand, count);
    narrow_from_float32(call_.dtype, finished_.data(), target, count);
  }

 private:
  // A mean is a sum until the last step; premul_sum has multiplied in prepare().
  [[nodiscard]] ReduceOp plain_op() const {
    return call_.op == ReduceOp::kMean || call_.op == ReduceOp::kPremulSum ? ReduceOp::kSum
                                                                           : call_.op;
  }

  // One's own contribution, widened and multiplied by the factor where the call asks for it.
  const std::byte* prepare(const std::byte* own, std::size_t count) {
    const std::byte* operand = own;
    if (is_short_float(call_.dtype)) {
      widened_.resize(count);
      widen_to_float32(call_.dtype, own, widened_.data(), count);
      operand = reinterpret_cast<const std::byte*>(widened_.data());
    }
    if (call_.op == ReduceOp::kPremulSum) {
      scaled_.resize(count * partial_bytes());
      const void* input = operand;
      void* output = scaled_.data();
      reduce({partial_, ReduceOp::kPremulSum, 1.0, {&call_.factor, 1}}, {&input, 1}, {&output, 1},
             count);
      operand = scaled_.data();
    }
    return operand;
  }

  void combine(ReduceOp op, std::byte* target, const std::byte* received, const std::byte* own,
               std::size_t count) const {
    const std::array<const void*, 2> inputs{received, own};
    void* output = target;
    reduce({partial_, op, static_cast<double>(size_), {}}, inputs, {&output, 1}, count);
  }

  const Call& call_;
  int size_;
  DType partial_;
  std::vector<float> widened_;
  std::vector<float> finished_;
  std::vector<std::byte> scaled_;
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
  std::size_t element_bytes;
  SendChannel& next;
  ReceiveChannel& previous;
};

Task reduce_scatter_segment(Ring& ring, PartialSums& sums, Segment segment, int me) {
  const auto own = [&](int rank) {
    const Block chunk = ring.chunks.input(rank);
    const Slice part = segment.of(chunk.count);
    return Block{chunk.data + part.begin * ring.element_bytes, part.count};
  };
  const Block first = own(ring.schedule.reduce_scatter_sends(0));
  co_await ring.next.until_free();
  sums.start(ring.next.slot(), first.data, first.count);
  ring.next.send(first.count * sums.partial_bytes());

  for (int step = 0; step < ring.schedule.steps(); ++step) {
    const Block mine = own(ring.schedule.reduce_scatter_receives(step));
    co_await ring.previous.until_received();
    if (step + 1 < ring.schedule.steps()) {
      co_await ring.next.until_free();
      sums.add(ring.next.slot(), ring.previous.slot(), mine.data, mine.count);
      ring.next.send(mine.count * sums.partial_bytes());
    } else {
      const Block all = ring.chunks.call.kind == OpKind::kReduceScatter
                            ? ring.chunks.call.outputs[0]
                            : ring.chunks.output(me);
      const Slice part = segment.of(all.count);
      sums.finish(all.data + part.begin * ring.element_bytes, ring.previous.slot(), mine.data,
                  mine.count);
    }
    ring.previous.release();
  }
}

Task all_gather_segment(Ring& ring, Segment segment) {
  const auto place = [&](int rank) {
    const Block chunk = ring.chunks.output(rank);
    const Slice part = segment.of(chunk.count);
    return Block{chunk.data + part.begin * ring.element_bytes, part.count * ring.element_bytes};
  };
  for (int step = 0; step < ring.schedule.steps(); ++step) {
    const Block sent = place(ring.schedule.all_gather_sends(step));
    co_await ring.next.until_free();
    if (sent.count != 0) {
      std::memcpy(ring.next.slot(), sent.data, sent.count);
    }
    ring.next.send(sent.count);

    const Block received = place(ring.schedule.all_gather_receives(step));
    co_await ring.previous.until_received();
    if (received.count != 0) {
      std::memcpy(received.data, ring.previous.slot(), received.count);
    }
    ring.previous.release();
  }
}

// A ring of one.
void run_alone(const Call& call, std::size_t element_bytes) {
  const Block input = call.inputs[0];
  const Block output = call.outputs[0];
  if (call.kind != OpKind::kAllGather && call.op == ReduceOp::kPremulSum) {
    const void* source = input.data;
    void* target = output.data;
    reduce({call.dtype, call.op, 1.0, {&call.factor, 1}}, {&source, 1}, {&target, 1}, input.count);
    return;
  }
  if (input.count != 0 && input.data != output.data) {
    std::memcpy(output.data, input.data, input.count * element_bytes);
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

  PartialSums sums(call, group.size());
  const std::size_t element_bytes = element_size(call.dtype);
  if (group.size() == 1) {
    run_alone(call, element_bytes);
    group.complete();
    co_return;
  }
  // The channel to the next rank lies in this rank's staging.
  group.prepare_staging();
  Ring ring{RingSchedule(group.rank(), group.size()), Chunks{call, group.size()}, element_bytes,
            next, previous};
  const bool gathers_only = call.kind == OpKind::kAllGather;
  if (gathers_only) {
    const Block own = ring.chunks.output(group.rank());
    if (own.count != 0 && own.data != call.inputs[0].data) {
      std::memcpy(own.data, call.inputs[0].data, own.count * element_bytes);
    }
  }
  const std::size_t per_segment =
      next.slot_bytes() / (gathers_only ? element_bytes : sums.partial_bytes());
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
  // The slots are staging for whatever comes next.
  co_await next.until_drained();
  group.complete();
}

}  // namespace pydist
