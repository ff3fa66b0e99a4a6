// What a rank gives to a collective besides its post, and how the data reaches the others.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "collectives/call.h"
#include "collectives/group.h"
#include "collectives/wire.h"

namespace pydist {

// How the data of a collective moves; the same on every rank, see agreed_route().
enum class Route { kInline, kOneShot, kPipelined, kSymmetric, kShared };

// Whether only the root has something to say; it then waits for nobody before it says it.
[[nodiscard]] constexpr bool is_one_to_all(OpKind kind) noexcept {
  return kind == OpKind::kBroadcast || kind == OpKind::kScatter;
}

// Whether each receiver gets a block of its own from each sender.
[[nodiscard]] constexpr bool is_personal(OpKind kind) noexcept {
  return kind == OpKind::kReduceScatter || kind == OpKind::kScatter || kind == OpKind::kAllToAll;
}

// The blocks that other ranks need of this one; none where nobody needs anything.
[[nodiscard]] Blocks contributed_blocks(const Group& group, const Call& call) noexcept;

// Where peers find this rank's buffers in the symmetric heap; both 0 unless all of the buffers that
// the kind can use there do lie in it.
[[nodiscard]] PostDetail places_on_heap(const Group& group, const Call& call) noexcept;

// Where peers find this rank's buffers in its allocation heap; both 0 unless all that they read
// there does lie in it, and stays as it is until all have read it.
[[nodiscard]] PostDetail places_in_allocations(const Group& group, const Call& call) noexcept;

// Which flag this rank posts: inline, eager, symmetric, shared, or none of them for the pipeline.
[[nodiscard]] std::uint8_t offered_route(const Group& group, const Call& call) noexcept;

// The same in a group that spans hosts: inline, eager, on the heap of the host, or none of them.
[[nodiscard]] std::uint8_t offered_to_hosts(const Group& group, const Call& call) noexcept;

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
