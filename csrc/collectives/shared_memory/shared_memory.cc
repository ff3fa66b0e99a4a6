#include "collectives/shared_memory/shared_memory.h"

#include <cstdint>

#include "collectives/collective_steps.h"
#include "collectives/shared_memory/in_place.h"
#include "collectives/shared_memory/on_symmetric_heap.h"
#include "collectives/shared_memory/one_shot.h"
#include "collectives/shared_memory/operation_time.h"
#include "collectives/shared_memory/pipelined.h"
#include "collectives/shared_memory/posting.h"
#include "collectives/shared_memory/route.h"

namespace pydist {

Task run_shared_memory(Group& group, Call call, bool is_posted) {
  Collective run(group, call);
  if (!is_posted) {
    Given given = offered_route(group, call);
    co_await group.may_post();
    if (given.offer == Offer::kInItsProcess &&
        !(is_waited_for(group, call) && is_readable(group, call))) {
      given.offer = Offer::kInPieces;
    }
    if (group.size() > 1 && given.offer == Offer::kEager) {
      co_await group.may_deposit_first();
    }
    fill_post(group, call, given);
    group.publish_post();
  }
  if (waits_for_posts(group, call)) {
    co_await group.posted_by_all();
  }

  const Route route = agree_on_route(group, call);
  OperationTime time(group, call, route);
  switch (route) {
    case Route::kInline:
    case Route::kOneShot:
      finish_one_shot(run, route);
      break;
    case Route::kPipelined:
      if (!contributed_blocks(group, call).empty() || call.kind == OpKind::kReduce) {
        group.prepare_transit();
      }
      if (call.kind == OpKind::kAllReduce || call.kind == OpKind::kReduce) {
        co_await reduce_through_transit(run);
      } else {
        co_await exchange_through_transit(run);
      }
      break;
    case Route::kSymmetric:
      co_await run_on_symmetric_heap(run);
      break;
    case Route::kShared:
    case Route::kSingleCopy:
      co_await run_in_place(run);
      break;
  }
  co_await time.all_are_through();
  time.note();
  group.complete();
}

}  // namespace pydist
