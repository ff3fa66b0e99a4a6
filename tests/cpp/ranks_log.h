// What ranks that are threads write to the log.

#pragma once

#include <string>

#include "ranks.h"

namespace pydist::testing {

// Calls `function` on `size` ranks, as run_ranks() does, and returns what they wrote.
[[nodiscard]] std::string log_of(int size, const RankFunction& function);

[[nodiscard]] int occurrences(const std::string& text, const std::string& part);

}  // namespace pydist::testing
