// What the ranks of a group tell each other of a step that each has taken by itself: whether it has
// failed anywhere, and why. So all come to the same error, or all go on.

#pragma once

#include <functional>
#include <optional>
#include <string>

#include "communicator/communicator.h"

namespace pydist {

struct Complaint {
  int rank;
  std::string text;  // cut to about 500 bytes
};

// What all ranks have told; the same on every rank.
struct Hearing {
  std::optional<Complaint> first;  // of the lowest rank that has failed
  bool all_say_yes = true;
};

// Collective. `complaint`: why this rank has failed; empty: it has not. `about` is the operation's
// label. `meanwhile` is called again and again until all ranks have told; it must not throw.
[[nodiscard]] Hearing hear_all(Communicator& communicator, const std::string& complaint,
                               const char* about, bool says_yes = true,
                               const std::function<void()>& meanwhile = nullptr);

}  // namespace pydist
