#include "communicator/nccl/late_ends.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

#include "base/fork.h"
#include "base/log.h"

namespace pydist {

LateEnds& LateEnds::of_process() {
  static auto* const ends = new LateEnds;  // a thread that hangs outlives static destructors
  return *ends;
}

std::list<LateEnds::End> LateEnds::take_over() {
  std::list<End> over;
  for (auto each = ends_.begin(); each != ends_.end();) {
    const auto next = std::next(each);
    if (each->is_over) {
      over.splice(over.end(), ends_, each);
    }
    each = next;
  }
  return over;
}

void LateEnds::start(const char* name, std::function<void()> end, Deadline until,
                     std::string complaint) {
  const std::lock_guard lock(mutex_);
  const auto over = std::make_shared<std::list<End>>(take_over());
  End& added = ends_.emplace_back();
  added.until = until;
  added.complaint = std::move(complaint);
  try {
    added.thread = EngineThread(name, [this, &added, over, end = std::move(end)]() mutable {
      end();
      end = nullptr;  // its captures end here, before the thread does
      // Not before: the end of a thread may wait for what `end` brings about.
      for (End& each : *over) {
        each.thread.join();
      }
      const std::lock_guard done(mutex_);
      added.is_over = true;
      changed_.notify_all();
    });
  } catch (...) {
    ends_.pop_back();
    ends_.splice(ends_.end(), *over);
    throw;
  }
}

void LateEnds::join(Deadline deadline) noexcept {
  if (in_forked_child()) {
    return;  // the threads are the parent's
  }
  std::list<End> over;
  {
    std::unique_lock lock(mutex_);
    const auto is_pending = [](const End& each) {
      return !each.is_over && !each.until.has_passed();
    };
    while (!deadline.has_passed()) {
      const auto first = std::find_if(ends_.begin(), ends_.end(), is_pending);
      if (first == ends_.end()) {
        break;
      }
      changed_.wait_until(lock, deadline.earlier_of(first->until).when());
    }
    for (End& each : ends_) {
      if (!each.is_over && each.until.has_passed() && !each.complaint.empty()) {
        log_line(LogLevel::kWarning, std::exchange(each.complaint, {}));
      }
    }
    over = take_over();
  }
  for (End& each : over) {
    each.thread.join();
  }
}

}  // namespace pydist
