#include "topology/placement.h"

#include <algorithm>
#include <map>

namespace pydist {

Placement::Placement(int size)
    : Placement(std::vector<std::string>(static_cast<std::size_t>(size))) {}

Placement::Placement(const std::vector<std::string>& identities) {
  std::map<std::string, int> numbers;
  for (const std::string& identity : identities) {
    const auto [known, is_new] = numbers.try_emplace(identity, hosts());
    if (is_new) {
      ranks_.emplace_back();
    }
    std::vector<int>& ranks = ranks_[static_cast<std::size_t>(known->second)];
    const int rank = size();
    places_.push_back({known->second, static_cast<int>(ranks.size())});
    ranks.push_back(rank);
  }
}

int Placement::least_on_a_host() const noexcept {
  std::size_t least = places_.size();
  for (const std::vector<int>& ranks : ranks_) {
    least = std::min(least, ranks.size());
  }
  return static_cast<int>(least);
}

}  // namespace pydist
