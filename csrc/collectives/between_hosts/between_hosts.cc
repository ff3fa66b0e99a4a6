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
  const Offer offer = offered_to_hosts(group, call);
  co_await group.may_post();
  const bool is_eager = offer == Offer::kEager;
  if (is_eager) {
    co_await group.may_deposit_first();
  }
  fill_post(group, call, {offer});
  group.publish_post(is_eager ? packed_bytes(group, call) : 0);
  // Everybody waits for everybody, also in the kinds in which only a root has something to say: so
  // nobody has to tell other hosts what it has completed, see Note [Reuse].
  co_await group.posted_by_all();
  group.note_all_posted();
  check_agreement(group, call, 0, group.size());

  const Route route = agreed_route(group, call);
  const bool may_go_by_hosts = has_hosts_of_several_ranks(placement);
  const OpKind kind = call.kind;
  if (route == Route::kInline || route == Route::kOneShot) {
    finish_one_shot(run, route);
  } else if (may_go_by_hosts && kind == OpKind::kAllReduce && fits_by_hosts(channels, placement)) {
    co_await all_reduce_by_hosts(run, channels, placement);
  } else if (may_go_by_hosts && (kind == OpKind::kReduceScatter || kind == OpKind::kReduce)) {
    co_await reduce_blocks_by_hosts(run, channels, placement);
  } else if (may_go_by_hosts && (kind == OpKind::kAllGather || kind == OpKind::kBroadcast)) {
    co_await spread_blocks_by_hosts(run, channels, placement);
  } else if (has_op(kind)) {
    co_await exchange_and_reduce(run, channels);
  } else {
    co_await exchange_blocks(run, channels);
  }
  group.complete();
}

}  // namespace pydist
