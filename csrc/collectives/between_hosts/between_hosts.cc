#include "collectives/between_hosts/between_hosts.h"

#include "collectives/between_hosts/blocks_by_hosts.h"
#include "collectives/between_hosts/by_hosts.h"
#include "collectives/between_hosts/exchange.h"
#include "collectives/call_mismatch.h"
#include "collectives/collective_steps.h"
#include "collectives/shared_memory/one_shot.h"
#include "collectives/shared_memory/posting.h"
#include "collectives/shared_memory/route.h"

namespace pydist {

Task run_between_hosts(Group& group, Call call, Channels& channels, const Placement& placement) {
  Collective run(group, call);
  const std::uint8_t offer = offered_to_hosts(group, call);
  co_await group.may_post();
  if ((offer & Post::kEager) != 0) {
    co_await group.may_deposit_first();
  }
  fill_post(group, call, offer);
  if ((offer & Post::kEager) != 0) {
    group.send_eager(contributed_bytes(group, call));
  }
  group.publish_post();
  // Everybody waits for everybody, also in the kinds in which only a root has something to say: so
  // nobody has to tell other hosts what it has completed, see Note [Reuse].
  co_await group.posted_by_all();
  group.note_all_posted();
  check_agreement(group, call, 0, group.size());

  const Route route = agreed_route(group, call);
  if (route == Route::kInline || route == Route::kOneShot) {
    finish_one_shot(run, route);
  } else if (call.kind == OpKind::kAllReduce && has_hosts_of_several_ranks(placement) &&
             fits_by_hosts(channels, placement)) {
    co_await all_reduce_by_hosts(run, channels, placement);
  } else if ((call.kind == OpKind::kReduceScatter || call.kind == OpKind::kReduce) &&
             has_hosts_of_several_ranks(placement)) {
    co_await reduce_blocks_by_hosts(run, channels, placement);
  } else if ((call.kind == OpKind::kAllGather || call.kind == OpKind::kBroadcast) &&
             has_hosts_of_several_ranks(placement)) {
    co_await spread_blocks_by_hosts(run, channels, placement);
  } else if (has_op(call.kind)) {
    co_await exchange_and_reduce(run, channels);
  } else {
    co_await exchange_blocks(run, channels);
  }
  group.complete();
}

}  // namespace pydist
