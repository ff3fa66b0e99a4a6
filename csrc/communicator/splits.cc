#include "communicator/splits.h"

#include <algorithm>
#include <cstddef>

#include "base/error.h"

namespace pydist {

Splits::Split Splits::next(const std::vector<int>& ranks, int rank, int size) {
  std::string members;
  std::vector<bool> seen(static_cast<std::size_t>(size), false);
  for (const int member : ranks) {
    const bool exists = member >= 0 && member < size;
    if (!exists || seen[static_cast<std::size_t>(member)]) {
      throw InvalidUsage(join("split: rank ", member, " is ",
                              exists ? "named twice" : "not a rank of the group",
                              "; ranks are 0 to ", size - 1, ", each at most once."));
    }
    seen[static_cast<std::size_t>(member)] = true;
    if (!members.empty()) {
      members += ',';
    }
    members += std::to_string(member);
  }
  const auto own = std::find(ranks.begin(), ranks.end(), rank);
  if (own == ranks.end()) {
    throw InvalidUsage(join("split: rank ", rank, " is not among the ranks of the new group (",
                            members, "); only its members make a group."));
  }
  const std::lock_guard lock(mutex_);
  return {static_cast<int>(own - ranks.begin()), join(members, "#", counts_[members]++)};
}

}  // namespace pydist
