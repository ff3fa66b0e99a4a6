#include "collectives/between_hosts/announcing.h"

#include <algorithm>
#include <span>
#include <vector>

#include "collectives/call_mismatch.h"
#include "topology/rounds.h"

namespace pydist {
namespace {

using NoData = std::span<const std::byte>;

// On each host, the ranks whose posts one of them passes on.
class Lane {
 public:
  Lane(const Placement& placement, int rank) noexcept
      : placement_(placement),
        lanes_(placement.least_on_a_host()),
        lane_(placement.index_on_host(rank) % lanes_) {}

  // Who does.
  [[nodiscard]] int driver(int host) const {
    return placement_.ranks_on(host)[static_cast<std::size_t>(lane_)];
  }
  // The others, and then the driver, who is known to be there only once they are.
  void append_ranks(int host, std::vector<int>& ranks) const {
    const std::span<const int> all = placement_.ranks_on(host);
    const int count = static_cast<int>(all.size());
    for (int index = lane_ + lanes_; index < count; index += lanes_) {
      ranks.push_back(all[static_cast<std::size_t>(index)]);
    }
    ranks.push_back(driver(host));
  }

 private:
  const Placement& placement_;
  const int lanes_;
  const int lane_;
};

Task drive_rounds(Group& group, const Call& call, const Placement& placement, Rider* rider) {
  const Lane lane(placement, group.rank());
  const int host = placement.host_of(group.rank());
  std::vector<int> ranks;
  lane.append_ranks(host, ranks);
  for (const int rank : ranks) {
    co_await group.posted_by(rank);
    check_agreement(group, call, rank, rank + 1);
  }
  const Rounds rounds(host, placement.hosts());
  for (int round = 0; round < rounds.count(); ++round) {
    // This host's own come last, as its driver's do for whom they tell that all are there.
    ranks.clear();
    for (int places = rounds.told(round) - 1; places >= 0; --places) {
      lane.append_ranks(rounds.after(places), ranks);
    }
    group.announcer()->send_posts(ranks, lane.driver(rounds.to(round)), group.sequence(),
                                  group.round(),
                                  rider != nullptr ? rider->message(round) : NoData());
    const int from = lane.driver(rounds.from(round));
    co_await group.posted_by(from);
    check_agreement(group, call, from, from + 1);  // see Note [Who does not pass on]
    if (rider != nullptr) {
      rider->take(round);
    }
  }
}

}  // namespace

Task announce_in_rounds(Group& group, const Call& call, const Placement& placement,
                        std::size_t eager_bytes, Rider* rider) {
  group.publish_post_on_host(eager_bytes);
  const std::span<const int> ranks = placement.ranks_on(placement.host_of(group.rank()));
  const std::span<const int> drivers =
      ranks.first(static_cast<std::size_t>(placement.least_on_a_host()));
  if (std::find(drivers.begin(), drivers.end(), group.rank()) != drivers.end()) {
    co_await drive_rounds(group, call, placement, rider);
    group.publish_passed_on();
  }
  for (const int driver : drivers) {
    co_await group.posted_by(driver);
    check_agreement(group, call, driver, driver + 1);  // one that does not agree may drive nothing
    co_await group.passed_on_by(driver);
  }
}

}  // namespace pydist
