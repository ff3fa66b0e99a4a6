// Which ranks of a group are on which host: pure arithmetic on what the ranks say of their hosts.
//
// Hosts are numbered by their lowest rank, which is the host's leader. Every rank comes to the same
// placement. A value.

#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace pydist {

class Placement {
 public:
  // Of ranks that all share one host.
  explicit Placement(int size);
  // `identities`: host_identity() of each rank, in rank order.
  explicit Placement(const std::vector<std::string>& identities);

  [[nodiscard]] int size() const noexcept { return static_cast<int>(places_.size()); }
  [[nodiscard]] int hosts() const noexcept { return static_cast<int>(ranks_.size()); }
  [[nodiscard]] bool spans_hosts() const noexcept { return hosts() > 1; }

  [[nodiscard]] int host_of(int rank) const noexcept { return place(rank).host; }
  // Among the ranks of its host, from 0.
  [[nodiscard]] int index_on_host(int rank) const noexcept { return place(rank).index; }
  // In ascending order.
  [[nodiscard]] std::span<const int> ranks_on(int host) const noexcept {
    return ranks_[static_cast<std::size_t>(host)];
  }
  [[nodiscard]] int leader_of(int host) const noexcept { return ranks_on(host).front(); }
  [[nodiscard]] bool share_host(int rank, int other) const noexcept {
    return host_of(rank) == host_of(other);
  }

  // The rank of `host` by which what `rank` publishes comes to that host. Another host's ranks are
  // dealt out to the ranks of `host` in turn, so that none of them receives for all.
  [[nodiscard]] int counterpart(int rank, int host) const noexcept {
    const std::span<const int> ranks = ranks_on(host);
    return ranks[static_cast<std::size_t>(index_on_host(rank)) % ranks.size()];
  }
  // The least number of ranks on a host.
  [[nodiscard]] int least_on_a_host() const noexcept;

 private:
  struct Place {
    int host;
    int index;
  };
  [[nodiscard]] const Place& place(int rank) const noexcept {
    return places_[static_cast<std::size_t>(rank)];
  }

  std::vector<Place> places_;            // by rank
  std::vector<std::vector<int>> ranks_;  // by host
};

}  // namespace pydist
