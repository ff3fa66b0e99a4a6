// What a rank gives to a collective besides its post, and how the data reaches the others.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "collectives/call.h"
#include "collectives/group.h"
#include "collectives/shared_memory/tuning_candidates.h"
#include "collectives/wire.h"

namespace pydist {

// How the data of a collective moves; the same on every rank, see agreed_route().
enum class Route { kInline, kOneShot, kPipelined, kSymmetric, kShared, kSingleCopy };

// Whether only the root has something to say; it then waits for nobody before it says it.
[[nodiscard]] constexpr bool is_one_to_all(OpKind kind) noexcept {
  return kind == OpKind::kBroadcast || kind == OpKind::kScatter;
}

// Whether each receiver gets a block of its own from each sender.
[[nodiscard]] constexpr bool is_personal(OpKind kind) noexcept {
  return kind == OpKind::kReduceScatter || kind == OpKind::kScatter || kind == OpKind::kAllToAll;
}

// Whether others may read this rank's data through the kernel, where the tuner finds it quicker.
// What is reduced would have to be copied first. And a root that sends to all goes on through
// transit before the others come; it is timed only where they wait for it already (OperationTime),
// so what it loses by waiting for its readers would not show.
[[nodiscard]] constexpr bool has_single_copy(OpKind kind) noexcept {
  return !has_op(kind) && !is_point_to_point(kind) && !is_one_to_all(kind);
}

// The blocks that other ranks need of this one; none where nobody needs anything.
[[nodiscard]] Blocks contributed_blocks(const Group& group, const Call& call) noexcept;

// Where peers find this rank's buffers, by an offer that is not ahead: both 0 unless all that the
// kind can use, or others read, does lie there, and stays as it is until all have read it.
[[nodiscard]] PostDetail places_of(const Group& group, const Call& call, Offer offer) noexcept;

// How a rank gives its data, and in which memory that lies for the tuner.
struct Given {
  Offer offer;
  TunedMemory memory = TunedMemory::kOrdinary;
};

// What this rank offers; kOnHostHeap in no case. kInItsProcess only where is_waited_for() and
// is_readable() say so besides.
[[nodiscard]] Given offered_route(const Group& group, const Call& call) noexcept;

// The same in a group that spans hosts: inline, eager, on the heap of the host, or in pieces.
[[nodiscard]] Offer offered_to_hosts(const Group& group, const Call& call) noexcept;

// Whether the root of a gather, which would read this rank's memory, is there already: through
// transit a rank could go on before that comes, so it must not have to wait for it. In the other
// kinds, in which a rank waits for the others in any case, true.
[[nodiscard]] bool is_waited_for(const Group& group, const Call& call) noexcept;

// Whether the kernel lets others read what this rank contributes: it may be memory of a device. One
// tensor is in memory of one kind, so its first byte tells.
[[nodiscard]] bool is_readable(const Group& group, const Call& call) noexcept;

// The most bytes of contributed_blocks() that a rank puts into one slot, ahead of its post.
// `pinned`: PYDIST_ONE_SHOT_BYTES.
[[nodiscard]] std::size_t one_shot_limit(OpKind kind, int size, std::size_t chunk_bytes,
                                         std::optional<std::size_t> pinned) noexcept;

// Bytes of contributed_blocks(), as they travel.
[[nodiscard]] std::size_t contributed_bytes(const Group& group, const Call& call) noexcept;

// Puts contributed_blocks() into `slot`, as they travel: where each receiver gets one of its own,
// the others' behind each other, in the order of the ranks after this one. So of two, each writes
// what it has read itself where they exchange their transits.
void pack_contribution(const Group& group, const Call& call, std::byte* slot);
// How long that is.
[[nodiscard]] std::size_t packed_bytes(const Group& group, const Call& call) noexcept;

// Decides from the posts. Precondition: all are posted (for a one-to-all kind: the root's).
[[nodiscard]] Route agreed_route(const Group& group, const Call& call) noexcept;

}  // namespace pydist
