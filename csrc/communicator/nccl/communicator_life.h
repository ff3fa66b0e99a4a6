// The life of NCCL's communicator in a group, step by step.
//
//     kJoining ───> kOpen
//        │            │      the group fails, or is shut down
//        └─────┬──────┘
//              v
//           kEnding
//           │  │  │
//           │  │  └──> kFinalizing       ends in good order
//           │  v        │    │
//           │  kAborting <   │           from kFinalizing: that came to no end
//           v    v           v
//           kEnded <──────────           from kEnding: there was nothing to end
//
// Whoever takes the step to kEnding ends the communicator: so it ends once. Where NCCL hangs, it
// stays in kAborting or kFinalizing for ever. What else is true of a group (it was shut down, has
// failed, launches, was captured) is kept apart: each may come at any step.
//
// Any thread may ask; steps are taken by one thread at a time.

#pragma once

#include <atomic>
#include <cstdint>

#include "base/error.h"

namespace pydist {

enum class LifeStep : std::uint8_t {
  kJoining,     // the ranks meet
  kOpen,        // there are launches
  kEnding,      // somebody has taken it upon them to end it
  kFinalizing,  // NCCL has been told to end it
  kAborting,    // NCCL has been told to break off the operations under way
  kEnded,       // there is none any more
};
inline constexpr int kLifeStepCount = 6;

class CommunicatorLife {
 public:
  [[nodiscard]] LifeStep now() const noexcept { return now_.load(std::memory_order_seq_cst); }
  [[nodiscard]] bool has_joined() const noexcept { return now() != LifeStep::kJoining; }
  [[nodiscard]] bool has_begun_to_end() const noexcept { return now() >= LifeStep::kEnding; }

  [[nodiscard]] static constexpr bool is_legal(LifeStep from, LifeStep to) noexcept {
    switch (to) {
      case LifeStep::kJoining:
        return false;
      case LifeStep::kOpen:
        return from == LifeStep::kJoining;
      case LifeStep::kEnding:
        return from == LifeStep::kJoining || from == LifeStep::kOpen;
      case LifeStep::kFinalizing:
        return from == LifeStep::kEnding;
      case LifeStep::kAborting:
        return from == LifeStep::kEnding || from == LifeStep::kFinalizing;
      case LifeStep::kEnded:
        return from == LifeStep::kEnding || from == LifeStep::kFinalizing ||
               from == LifeStep::kAborting;
    }
    return false;
  }

  // Throws Error where the transition is not legal, which is a bug of the engine.
  void step_to(LifeStep next) {
    PYDIST_CHECK(is_legal(now(), next));
    now_.store(next, std::memory_order_seq_cst);
  }

 private:
  std::atomic<LifeStep> now_{LifeStep::kJoining};
};

}  // namespace pydist
