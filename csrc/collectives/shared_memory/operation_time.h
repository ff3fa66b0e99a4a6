// Takes the time of an operation where the tuner has asked for it.
//
// The root of a one-to-all kind waits for nobody: it may be through long before the others are. It
// is timed only where all others wait for it when it begins, and then it does wait for them at the
// end, which is as long as they take to copy. A root that is ahead stays so.

#pragma once

#include <chrono>

#include "collectives/call.h"
#include "collectives/group.h"
#include "collectives/shared_memory/tuning.h"

namespace pydist {

class OperationTime {
 public:
  // Begins once all have posted, for those that wait for that.
  OperationTime(Group& group, const Call& call, Route route)
      : group_(group), is_of_root_(is_one_to_all(call.kind)) {
    Tuning* const tuning = group.tuning();
    if (tuning != nullptr && tuning->chooses(call) && tuning->is_timed(route) &&
        (!is_of_root_ || group.posted_by_all().holds())) {
      tuning_ = tuning;
      begin_ = std::chrono::steady_clock::now();
    }
  }

  // What is to be waited for before note(); holds at once where nothing is.
  [[nodiscard]] Condition all_are_through() const noexcept {
    return tuning_ != nullptr && is_of_root_
               ? group_.done_by_all(&RankControl::consumed, group_.round() - 1)
               : Condition();
  }
  void note() {
    if (tuning_ != nullptr) {
      tuning_->note(std::chrono::steady_clock::now() - begin_);
    }
  }

 private:
  Group& group_;
  const bool is_of_root_;
  Tuning* tuning_ = nullptr;
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace pydist
