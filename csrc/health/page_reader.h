// The page of a process, as somebody reads it who is no peer: `pydist doctor`. Read-only.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "health/journal.h"

namespace pydist {

struct PageReading {
  std::int32_t pid = 0;    // of the owner, as the owner sees it
  std::int32_t rank = -1;  // of the owner in its job; -1 before it has joined
  bool has_departed = false;
  // Since the owner's last sign of life.
  double silent_s = 0.0;
  std::vector<JournalEntry> entries;  // the newest first
  std::int64_t now_ns = 0;            // on the clock of the entries
};

// Reads the page behind a descriptor, which stays open. Throws InvalidUsage where the file is no
// page of this version of pydist, by its size.
[[nodiscard]] PageReading read_page(int fd);

}  // namespace pydist
