// The groups that are split off one group: who is in them, and what they are called.
//
// Thread safe.

#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace pydist {

class Splits {
 public:
  struct Split {
    int rank;          // this process's in the new group
    std::string name;  // unique among the group's splits, the same on all its members
  };

  // The next split into `ranks`, for rank `rank` of `size`. Its members have split off the same
  // group equally often, so they meet under one name. Throws InvalidUsage for ranks that do not
  // exist or stand twice, and for a caller that is not among them.
  [[nodiscard]] Split next(const std::vector<int>& ranks, int rank, int size);

 private:
  std::mutex mutex_;
  std::map<std::string, int> counts_;  // guarded by mutex_
};

}  // namespace pydist
