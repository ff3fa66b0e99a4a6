#include "collectives/between_hosts/between_hosts.h"

#include <algorithm>
#include <optional>

#include "collectives/between_hosts/announcing.h"
#include "collectives/between_hosts/blocks_by_hosts.h"
#include "collectives/between_hosts/by_hosts.h"
#include "collectives/between_hosts/exchange.h"
#include "collectives/between_hosts/in_rounds.h"
#include "collectives/call_mismatch.h"
#include "collectives/collective_steps.h"
#include "collectives/shared_memory/one_shot.h"
#include "collectives/shared_memory/posting.h"
#include "collectives/shared_memory/route.h"

namespace pydist {

RoundsSettings rounds_settings(const Environment& environment, int hosts,
                               bool are_on_one_machine) noexcept {
  constexpr std::size_t kMostBytes = std::size_t{256} << 10;
  constexpr std::size_t kBytesOfAHost = std::size_t{4} << 10;
  const std::size_t bytes = static_cast<std::size_t>(hosts) * kBytesOfAHost;
  return {.from_hosts = environment.rounds_from.value_or(are_on_one_machine ? 3 : 32),
          .most_bytes = environment.rounds_bytes.value_or(
              are_on_one_machine ? kMostBytes : std::min(bytes, kMostBytes))};
}

Task run_between_hosts(Group& group, Call call, Channels& channels, const Placement& placement,
                       RoundsSettings rounds) {
  Collective run(group, call);
  const Offer offer = offered_to_hosts(group, call);
  co_await group.may_post();
  const bool is_eager = offer == Offer::kEager;
  const bool may_go_by_hosts = has_hosts_of_several_ranks(placement);
  const auto hosts = static_cast<std::size_t>(placement.hosts());
  std::optional<AllReduceInRounds> in_rounds;
  if (hosts >= rounds.from_hosts && !may_go_by_hosts && !is_ahead(offer) &&
      goes_in_rounds(run, rounds.most_bytes)) {
    in_rounds.emplace(run);
  }
  if (is_eager || in_rounds) {
    co_await group.may_deposit_first();
  }
  fill_post(group, call, {offer});
  // Everybody waits for everybody, also in the kinds in which only a root has something to say: so
  // nobody has to tell other hosts what it has completed, see Note [Reuse].
  const std::size_t eager_bytes = is_eager ? packed_bytes(group, call) : 0;
  if (hosts >= rounds.from_hosts) {
    co_await announce_in_rounds(group, call, placement, eager_bytes,
                                in_rounds ? &*in_rounds : nullptr);
  } else {
    group.publish_post(eager_bytes);
    co_await group.posted_by_all();
  }
  group.note_all_posted();
  check_agreement(group, call, 0, group.size());

  const Route route = agreed_route(group, call);
  const OpKind kind = call.kind;
  if (route == Route::kInline || route == Route::kOneShot) {
    finish_one_shot(run, route);
  } else if (in_rounds) {
    co_await in_rounds->finish();
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
