// What the tuner may choose from, for each class of collectives.

#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "tuning/tuning_class.h"

namespace pydist {

// What the user has said, PYDIST_CHUNK_BYTES and PYDIST_ONE_SHOT_BYTES, and what the system allows.
struct TuningLimits {
  std::size_t chunk_bytes = 0;
  bool pins_piece = false;
  std::optional<std::size_t> one_shot_bytes;
  bool reads_processes = false;
};

// The first is what is taken without a tuner; it is the only one where there is nothing to choose.
[[nodiscard]] std::vector<Choice> candidates_for(const TuningKey& key, const TuningLimits& limits);

// Whether a rank may announce pieces of so many bytes.
[[nodiscard]] bool is_a_piece(std::size_t bytes, std::size_t chunk_bytes, int ranks) noexcept;

}  // namespace pydist
