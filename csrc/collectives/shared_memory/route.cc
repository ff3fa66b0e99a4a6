#include "collectives/shared_memory/route.h"

#include <algorithm>

#include "collectives/shared_memory/tuning.h"

namespace pydist {
namespace {

// Up to here it pays that every rank reads every other one's data whole, instead of waiting once
// more for the owners of slices. Measured with bench/engine at p=2 and p=4.
constexpr std::size_t kOneShotReadBytes = std::size_t{128} << 10;

// Where all data goes to each rank anyway, one slot is as good as many small chunks.
constexpr std::size_t kOneShotBytes = std::size_t{64} << 10;

bool reduces(OpKind kind) noexcept { return kind == OpKind::kAllReduce || kind == OpKind::kReduce; }

// Up to here, data that is read where it was deposited costs less than a second meeting of all
// ranks, which buffers in the symmetric heap need: their ranks must know when they have been read
// and written. Measured with bench/engine at p=2.
constexpr std::size_t kEagerBytes = std::size_t{2} << 10;

HeapReference reference(const Group& group, const Blocks& blocks) noexcept {
  if (!blocks.is_contiguous()) {
    return 0;
  }
  const Buffer& buffer = blocks.buffers()[0];
  return group.heap().find(buffer.data, buffer.bytes());
}

// Whether a rank that is done early would overwrite what others still read of it. In other kinds
// only a rank's own block may be in place, which nobody else reads.
bool exchanges_in_place(const Call& call) noexcept {
  if (call.kind != OpKind::kAllToAll) {
    return false;
  }
  const auto* const begin = static_cast<const std::byte*>(call.inputs.buffers()[0].data);
  const std::byte* const end = begin + call.inputs.buffers()[0].bytes();
  const auto buffers = call.outputs.buffers();
  return std::any_of(buffers.begin(), buffers.end(), [&](const Buffer& output) {
    const auto* const place = static_cast<const std::byte*>(output.data);
    return place < end && begin < place + output.bytes();
  });
}

std::size_t limit_of(const Group& group, OpKind kind) noexcept {
  return one_shot_limit(kind, group.size(), group.chunk_bytes(), group.one_shot_bytes());
}

bool usually_goes_ahead(const Group& group, const Call& call, std::size_t bytes) noexcept {
  return bytes <= limit_of(group, call.kind);
}

// As the rank that chooses has said, or else as is `usual`.
Offer agreed_way(const Group& group, const Call& call, TunedMemory memory, std::size_t bytes,
                 Offer usual) noexcept {
  const Tuning* const tuning = group.tuning();
  return tuning == nullptr ? usual : tuning->agreed_way(call, memory, bytes, usual);
}

// What data that rides in a post is offered as; nothing where it does not fit.
std::optional<Offer> inline_offer(std::size_t bytes) noexcept {
  if (bytes <= kFirstLineBytes) {
    return Offer::kInFirstLine;
  }
  return bytes <= kInlineBytes ? std::optional(Offer::kInLines) : std::nullopt;
}

PostDetail places_on_heap(const Group& group, const Call& call) noexcept {
  PostDetail detail;
  switch (call.kind) {
    case OpKind::kAllReduce:
      detail.input = reference(group, call.inputs);
      detail.output = reference(group, call.outputs);
      break;
    case OpKind::kReduceScatter:
      detail.input = reference(group, call.inputs);
      detail.output = detail.input;
      break;
    case OpKind::kAllGather:
      detail.output = reference(group, call.outputs);
      detail.input = detail.output;
      break;
    case OpKind::kBroadcast:
      if (group.rank() == call.root) {
        detail.input = reference(group, call.inputs);
        detail.output = detail.input;
      }
      break;
    default:
      break;
  }
  return detail;
}

PostDetail places_in_allocations(const Group& group, const Call& call) noexcept {
  PostDetail detail;
  if (!group.shares_allocations() || call.kind == OpKind::kReduce) {
    return detail;
  }
  const auto find = [&group](const Blocks& blocks) -> HeapReference {
    return blocks.is_contiguous()
               ? group.window(group.rank())
                     ->find(blocks.buffers()[0].data, blocks.buffers()[0].bytes())
               : 0;
  };
  detail.input = find(contributed_blocks(group, call));
  if (call.kind == OpKind::kAllReduce) {
    detail.output = find(call.outputs);
  } else if (detail.input == 0 || !exchanges_in_place(call)) {
    detail.output = detail.input;
  }
  return detail;
}

PostDetail places_in_process(const Group& group, const Call& call) noexcept {
  PostDetail detail;
  const Blocks blocks = contributed_blocks(group, call);
  if (blocks.is_contiguous() && !exchanges_in_place(call)) {
    detail.input = reinterpret_cast<std::uintptr_t>(blocks.buffers()[0].data);
    detail.output = detail.input;
  }
  return detail;
}

bool is_whole(const PostDetail& places) noexcept { return places.input != 0 && places.output != 0; }

}  // namespace

PostDetail places_of(const Group& group, const Call& call, Offer offer) noexcept {
  switch (offer) {
    case Offer::kSymmetric:
    case Offer::kOnHostHeap:
      return places_on_heap(group, call);
    case Offer::kShared:
      return places_in_allocations(group, call);
    case Offer::kInItsProcess:
      return places_in_process(group, call);
    default:
      return {};
  }
}

std::size_t one_shot_limit(OpKind kind, int size, std::size_t chunk_bytes,
                           std::optional<std::size_t> pinned) noexcept {
  const std::size_t usual =
      reduces(kind) ? kOneShotReadBytes / static_cast<std::size_t>(size - 1) : kOneShotBytes;
  return std::min(pinned.value_or(usual), chunk_bytes);
}

std::size_t contributed_bytes(const Group& group, const Call& call) noexcept {
  if (group.size() == 1) {
    return 0;
  }
  if (call.kind == OpKind::kAllReduce) {
    return call.count * element_size(call.wire_dtype);
  }
  const Blocks blocks = contributed_blocks(group, call);
  return blocks.empty() ? 0 : blocks.total() * element_size(call.wire_dtype);
}

Offer offered_to_hosts(const Group& group, const Call& call) noexcept {
  const std::size_t bytes = contributed_bytes(group, call);
  if (const std::optional<Offer> offer = inline_offer(bytes)) {
    return *offer;
  }
  if (usually_goes_ahead(group, call, bytes)) {
    return Offer::kEager;
  }
  return call.kind == OpKind::kAllReduce && is_whole(places_on_heap(group, call))
             ? Offer::kOnHostHeap
             : Offer::kInPieces;
}

Blocks contributed_blocks(const Group& group, const Call& call) noexcept {
  const bool is_root = group.rank() == call.root;
  switch (call.kind) {
    case OpKind::kBroadcast:
    case OpKind::kScatter:
      return is_root ? call.inputs : Blocks();
    case OpKind::kReduce:
    case OpKind::kGather:
      return is_root ? Blocks() : call.inputs;
    default:
      return call.inputs;
  }
}

Given offered_route(const Group& group, const Call& call) noexcept {
  const std::size_t bytes = contributed_bytes(group, call);
  if (const std::optional<Offer> offer = inline_offer(bytes)) {
    return {*offer};
  }
  const bool is_usually_ahead = usually_goes_ahead(group, call, bytes);
  if (is_usually_ahead && bytes <= kEagerBytes) {
    return {Offer::kEager};
  }
  const auto way_of = [&](TunedMemory memory, Offer of_large) {
    return agreed_way(group, call, memory, bytes, is_usually_ahead ? Offer::kEager : of_large);
  };
  if (call.wire_dtype != call.dtype) {
    // Nothing travels between buffers that everybody sees, so nothing would be rounded on the way;
    // but where a buffer lies must not decide about a result.
    return {way_of(TunedMemory::kConverted, Offer::kInPieces), TunedMemory::kConverted};
  }
  if (is_whole(places_on_heap(group, call))) {
    return {Offer::kSymmetric, TunedMemory::kSymmetric};
  }
  if (is_whole(places_in_allocations(group, call))) {
    return {way_of(TunedMemory::kShared, Offer::kShared), TunedMemory::kShared};
  }
  const Offer way = way_of(TunedMemory::kOrdinary, Offer::kInPieces);
  return {way == Offer::kInItsProcess && !is_whole(places_in_process(group, call))
              ? Offer::kInPieces
              : way};
}

bool is_waited_for(const Group& group, const Call& call) noexcept {
  return call.kind != OpKind::kGather || group.posted_by(call.root).holds();
}

bool is_readable(const Group& group, const Call& call) noexcept {
  return group.process(group.rank()).has(places_in_process(group, call).input);
}

void pack_contribution(const Group& group, const Call& call, std::byte* slot) {
  const Blocks blocks = contributed_blocks(group, call);
  if (blocks.empty()) {
    return;
  }
  const Wire wire(call.dtype, call.wire_dtype);
  if (!is_personal(call.kind)) {
    const Buffer& buffer = blocks.buffers()[0];
    wire.put(slot, static_cast<const std::byte*>(buffer.data), buffer.count);
    return;
  }
  for (int turn = 1; turn < group.size(); ++turn) {
    const Block block = blocks[(group.rank() + turn) % group.size()];
    wire.put(slot, block.data, block.count);
    slot += wire.bytes(block.count);
  }
}

std::size_t packed_bytes(const Group& group, const Call& call) noexcept {
  const std::size_t bytes = contributed_bytes(group, call);
  if (bytes == 0 || !is_personal(call.kind)) {
    return bytes;
  }
  return bytes -
         contributed_blocks(group, call)[group.rank()].count * element_size(call.wire_dtype);
}

Route agreed_route(const Group& group, const Call& call) noexcept {
  const bool root_alone = is_one_to_all(call.kind);
  bool all_symmetric = true;
  bool all_inline = true;
  bool all_ahead = true;
  bool all_readable = true;  // each rank has sent its data ahead, or it is read where it lies
  bool any_in_process = false;
  // In an all_reduce all data is read by all ranks, and may be in place: only slice by slice.
  const bool takes_no_slices = call.kind != OpKind::kAllReduce;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (!root_alone || rank == call.root) {
      const Offer offer = group.post(rank).offer();
      all_symmetric = all_symmetric && offer == Offer::kSymmetric;
      all_inline = all_inline && is_inline(offer);
      all_ahead = all_ahead && is_ahead(offer);
      all_readable =
          all_readable && (is_read_in_place(offer) || (takes_no_slices && is_ahead(offer)));
      any_in_process = any_in_process || offer == Offer::kInItsProcess;
    }
  }
  if (all_symmetric) {
    return Route::kSymmetric;
  }
  if (all_inline) {
    return Route::kInline;
  }
  if (all_ahead) {
    return Route::kOneShot;
  }
  if (!all_readable) {
    return Route::kPipelined;
  }
  return any_in_process ? Route::kSingleCopy : Route::kShared;
}

}  // namespace pydist
