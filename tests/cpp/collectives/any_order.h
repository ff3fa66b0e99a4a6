// Drives the ranks of a collective by one thread, in an order drawn at random.

#pragma once

#include <memory>
#include <random>
#include <vector>

#include "collectives/task.h"

namespace pydist {

// Any rank that can moves next, or else what is between them: `move_between` moves one thing there,
// drawn at random, and returns whether there was any. Returns false where all wait, in a circle.
template <typename MoveBetween>
[[nodiscard]] bool end_in_any_order(const std::vector<std::unique_ptr<Execution>>& ranks,
                                    std::mt19937& random, const MoveBetween& move_between) {
  while (true) {
    std::vector<Execution*> ready;
    bool are_done = true;
    for (const auto& rank : ranks) {
      are_done = are_done && rank->is_done();
      if (!rank->is_done() && rank->is_ready()) {
        ready.push_back(rank.get());
      }
    }
    if (are_done) {
      return true;
    }
    if (random() % 2 == 0 && move_between(random)) {
      continue;
    }
    if (!ready.empty()) {
      ready[random() % ready.size()]->resume();
    } else if (!move_between(random)) {
      return false;
    }
  }
}

[[nodiscard]] inline bool end_in_any_order(const std::vector<std::unique_ptr<Execution>>& ranks,
                                           std::mt19937& random) {
  return end_in_any_order(ranks, random, [](std::mt19937&) { return false; });
}

}  // namespace pydist
