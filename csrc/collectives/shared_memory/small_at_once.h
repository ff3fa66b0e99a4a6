// The fast way of small collectives: over before anything is queued, on the caller's own stack.
//
// Note [At once]: a collective whose data travels with its post is over as soon as all have posted.
// Where peers are in time, that takes a fraction of a microsecond, less than a coroutine and its
// scheduling would cost. So the caller first tries on its own stack: it posts, looks at the others'
// posts a bounded number of times, and combines them. A rank that has to wait longer continues in
// the coroutine from the step that it has reached. Peers notice no difference.

#pragma once

#include <cstdint>

#include "collectives/call.h"
#include "collectives/group.h"
#include "collectives/shared_memory/route.h"

namespace pydist {

class AtOnce {
 public:
  AtOnce(Group& group, const Call& call) noexcept;

  // Whether the call can be posted with its data, or can be within so many `looks`: a rank that
  // waits for nobody, such as the root of a broadcast, may be as far ahead of the others as there
  // are posts. Before Group::begin().
  [[nodiscard]] bool may_post(unsigned looks) noexcept;
  // Posts it, but wakes nobody: try_finish() follows. After Group::begin().
  void post();
  // Completes it if everybody's post, each with its data, is there within so many `looks`; a
  // sequentially consistent fence and Group::ring_after_fence() have to follow. Otherwise false:
  // run_shared_memory() has to take over. Throws Mismatch.
  [[nodiscard]] bool try_finish(unsigned looks);

 private:
  Group& group_;
  const Call& call_;
  const Given given_;
};

}  // namespace pydist
