// Drives the ranks of a collective by one thread, in an order drawn at random.

#pragma once

#include <memory>
#include <random>
#include <vector>

#include "collectives/task.h"

namespace pydist {

// Any rank that can moves next. Returns false where all wait, in a circle.
[[nodiscard]] inline bool end_in_any_order(const std::vector<std::unique_ptr<Execution>>& ranks,
                                           std::mt19937& random) {
  while (true) {
    std::vector<Execution*> ready;
    bool are_done = true;
    for (const auto& rank : ranks) {
      are_done = are_done && rank->is_done();
      if (!rank->is_done() && rank->is_ready()) {
        ready.push_back(rank.get());
      }
    }
    if (are_done || ready.empty()) {
      return are_done;
    }
    ready[random() % ready.size()]->resume();
  }
}

}  // namespace pydist
