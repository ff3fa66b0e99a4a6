// What a program chooses when a reducer is made.

#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>

#include "base/dtype.h"

namespace pydist {

struct ReducerOptions {
  bool sums = false;  // rather than averages
  // The type in which float32 gradients travel between hosts, if another.
  std::optional<DType> wire_dtype;
  bool measures_link = true;
  // Compares the gradients of all ranks, bit by bit, after every round.
  bool checks_gradients = false;
  // Calls a function while no user code looks at the module's gradients. User code may look again
  // as soon as it has caught the exception of a backward, while autograd's thread is still
  // releasing that backward.
  std::function<void(const std::function<void()>&)> among_users =
      [](const std::function<void()>& function) { function(); };
  // Gradients are mere views of the buckets' memory, which the next step writes again.
  bool gradients_are_views = false;
  // Bytes from which on gradients are made in place, see gradients/gradient_forecast.h.
  std::size_t least_made_in_place = 0;
  // A path, and the rank in the job that the trace is of; empty for none.
  std::string timeline;
  int timeline_rank = 0;
};

}  // namespace pydist
