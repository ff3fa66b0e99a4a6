#include "collectives/shared_memory/small_at_once.h"

#include "collectives/collective_steps.h"
#include "collectives/shared_memory/one_shot.h"
#include "collectives/shared_memory/operation_time.h"
#include "collectives/shared_memory/posting.h"
#include "collectives/shared_memory/route.h"
#include "health/doorbell.h"

namespace pydist {
namespace {

// How often this rank looks at the others' posts before its first pause. A rank that enters
// together with this one has posted by then.
constexpr unsigned kLooksInARow = 16;

bool comes_true(Condition condition, unsigned looks) noexcept {
  for (unsigned look = 1; !condition.holds(); ++look) {
    if (look >= looks) {
      return false;
    }
    spin_pause();
  }
  return true;
}

}  // namespace

AtOnce::AtOnce(Group& group, const Call& call) noexcept
    : group_(group), call_(call), given_(offered_route(group, call)) {}

bool AtOnce::may_post(unsigned looks) noexcept {
  if (!is_ahead(given_.offer)) {
    return false;
  }
  if (!group_.next_may_post()) {
    if (!comes_true(group_.until_next_may_post(), looks)) {
      return false;
    }
    group_.note_completed();
  }
  if (!is_inline(given_.offer) && !group_.next_may_deposit()) {
    if (!comes_true(group_.until_next_may_deposit(), looks)) {
      return false;
    }
    group_.note_consumed();
  }
  return true;
}

void AtOnce::post() {
  fill_post(group_, call_, given_);
  // A fence at once would only wait until the post is out.
  group_.publish_post_quietly();
}

bool AtOnce::try_finish(unsigned looks) {
  if (waits_for_posts(group_, call_)) {
    Condition all_have_posted = group_.posted_by_all();
    for (unsigned look = 1; !all_have_posted.holds(); ++look) {
      if (look >= looks) {
        group_.notify();
        return false;
      }
      if (look == kLooksInARow) {
        // Somebody is late; those who sleep may be waiting for this rank.
        group_.notify();
      } else if (look > kLooksInARow) {
        spin_pause();
      }
    }
  }
  const Route route = agree_on_route(group_, call_);
  if (route != Route::kInline && route != Route::kOneShot) {
    group_.notify();
    return false;
  }
  OperationTime time(group_, call_, route);
  Collective run(group_, call_);
  finish_one_shot(run, route);
  time.note();
  group_.complete_quietly();
  return true;
}

}  // namespace pydist
