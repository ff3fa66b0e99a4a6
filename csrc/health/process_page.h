// The page that a process shows to its peers on the host: its doorbell, its sign of life and its
// journal. Zeroed shared memory, written by its owner (the doorbell by everybody).

#pragma once

#include <atomic>
#include <cstdint>

#include "health/doorbell.h"
#include "health/journal.h"

namespace pydist {

struct ProcessPage {
  Doorbell doorbell;
  // Monotonic time of the owner's last sign of life.
  alignas(64) std::atomic<std::int64_t> heartbeat_ns;
  // Set once the owner has shut down in good order: its death is then no failure by itself.
  std::atomic<std::uint32_t> has_departed;
  Journal journal;
};

}  // namespace pydist
