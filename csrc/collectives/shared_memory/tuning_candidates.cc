#include "collectives/shared_memory/tuning_candidates.h"

#include <algorithm>

#include "collectives/shared_memory/route.h"
#include "collectives/streaming_hint.h"

namespace pydist {
namespace {

constexpr std::size_t kLeastPieceBytes = std::size_t{64} << 10;
// A piece has room for the block of every rank where each receiver gets its own.
constexpr std::size_t kLeastLaneBytes = 1024;
// One shot and pieces are compared where the sizes are at most so many times the usual limit, or
// one part in so many of it.
constexpr std::size_t kNearTheLimit = 4;
// Between these sizes of results, processors differ in which stores are faster.
constexpr std::size_t kLeastOpenResult = std::size_t{2} << 20;
constexpr std::size_t kLargestOpenResult = std::size_t{32} << 20;

bool has_a_result_of_one_block(OpKind kind) noexcept {
  return kind == OpKind::kReduceScatter || kind == OpKind::kScatter || kind == OpKind::kAllToAll;
}

// The sizes of pieces that make a difference, the smallest first.
std::vector<std::uint32_t> pieces_for(const TuningKey& key, const TuningLimits& limits) {
  std::vector<std::uint32_t> pieces;
  const std::size_t top = top_of(key.size_class);
  if (!limits.pins_piece) {
    for (std::size_t piece = kLeastPieceBytes; piece < limits.chunk_bytes; piece *= 2) {
      if (is_a_piece(piece, limits.chunk_bytes, key.ranks)) {
        pieces.push_back(static_cast<std::uint32_t>(piece));
        if (piece >= top) {
          return pieces;
        }
      }
    }
  }
  pieces.push_back(static_cast<std::uint32_t>(limits.chunk_bytes));
  return pieces;
}

}  // namespace

bool is_a_piece(std::size_t bytes, std::size_t chunk_bytes, int ranks) noexcept {
  const std::size_t least =
      std::max(kLeastPieceBytes, kLeastLaneBytes * static_cast<std::size_t>(ranks));
  return bytes == chunk_bytes || (bytes >= least && bytes < chunk_bytes && bytes % 64 == 0);
}

std::vector<Choice> candidates_for(const TuningKey& key, const TuningLimits& limits) {
  const std::size_t top = top_of(key.size_class);
  const std::size_t result =
      has_a_result_of_one_block(key.kind) ? top / static_cast<std::size_t>(key.ranks) : top;
  const bool streams = hint_for(result) == StoreHint::kStreaming;
  // Conversions have one kind of store, as have sums out of slots.
  const bool has_hints =
      key.memory == TunedMemory::kSymmetric ||
      (key.memory != TunedMemory::kConverted && key.kind != OpKind::kReduceScatter);
  std::vector<bool> hints = {streams};
  if (has_hints && result >= kLeastOpenResult && result <= kLargestOpenResult) {
    hints.push_back(!streams);
  }

  std::vector<std::uint32_t> pieces = {0};
  if (key.memory != TunedMemory::kSymmetric) {
    const std::size_t limit =
        one_shot_limit(key.kind, key.ranks, limits.chunk_bytes, limits.one_shot_bytes);
    const bool is_usually_one_shot = top <= limit;
    // The root of a one-to-all kind has gone ahead before anybody could time its one shot.
    const bool is_open = !limits.one_shot_bytes && !is_one_to_all(key.kind) &&
                         top <= std::min(limit * kNearTheLimit, limits.chunk_bytes) &&
                         top * kNearTheLimit >= limit;
    if (is_open || !is_usually_one_shot) {
      const std::vector<std::uint32_t> in_pieces = pieces_for(key, limits);
      if (!is_open) {
        pieces.clear();
      }
      pieces.insert(pieces.end(), in_pieces.begin(), in_pieces.end());
    }
    // Without a tuner pieces are as large as they may be.
    if (!is_usually_one_shot) {
      std::rotate(pieces.begin(), pieces.end() - 1, pieces.end());
    }
  }

  std::vector<Choice> choices;
  for (const bool hint : hints) {
    for (const std::uint32_t piece : pieces) {
      choices.push_back({piece, hint});
    }
  }
  if (key.memory == TunedMemory::kSymmetric || pieces == std::vector<std::uint32_t>{0}) {
    return choices;
  }
  if (key.memory == TunedMemory::kShared) {
    // What the root of a one-to-all kind loses by waiting for its readers would not show, see
    // has_single_copy(). And the root of a gather, which chooses, gives nothing that lies there.
    if (is_one_to_all(key.kind) || key.kind == OpKind::kGather) {
      choices.clear();
    }
    // Without a tuner, what does not go in one shot is read in place.
    const bool is_usually_one_shot = !choices.empty() && choices[0].piece_bytes == 0;
    auto place = is_usually_one_shot ? choices.end() : choices.begin();
    for (const bool hint : hints) {
      place = choices.insert(place, {.piece_bytes = 0, .streams = hint, .in_place = true}) + 1;
    }
  } else if (limits.reads_processes && key.memory == TunedMemory::kOrdinary &&
             has_single_copy(key.kind)) {
    choices.push_back({.piece_bytes = 0, .streams = streams, .in_place = true});
  }
  return choices;
}

}  // namespace pydist
