// For whom a group on gloo waits, as far as that can be seen from outside; see Note [Long waits on
// gloo] in gloo_group.h.

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/engine_thread.h"
#include "base/log.h"
#include "c10d/gloo/gloo_group.h"
#include "health/text_field.h"

namespace pydist {
namespace {

// Under which a rank says that it has been in a collective for long.
std::string in_key(std::uint64_t number, int rank) { return join("in/", number, "/", rank); }

}  // namespace

void GlooGroup::know_processes(std::vector<ProcessIdentity> processes) {
  const std::lock_guard lock(mutex_);
  processes_ = std::move(processes);
}

KnownProcess GlooGroup::known(int rank) const {
  const std::lock_guard lock(mutex_);
  if (processes_.empty()) {
    return {.rank = rank};
  }
  const ProcessIdentity& its = processes_[static_cast<std::size_t>(rank)];
  const ProcessIdentity& own = processes_[static_cast<std::size_t>(channel.rank())];
  const int pid = static_cast<int>(its.pid);
  return {.rank = rank,
          .host = read_text(its.host),
          .pid = pid,
          .local_pid = its.machine == own.machine ? pid : 0,
          .started = its.started};
}

std::string GlooGroup::plight_of(int rank) const {
  try {
    if (const auto how = how_gone(*store_, rank)) {
      return std::string(cause_in(*how));
    }
  } catch (const std::exception&) {
    // The store is gone.
  }
  return std::string(in_words(state_of(rank)));
}

std::string GlooGroup::silence_of(const std::vector<int>& missing, Blame& blame) const {
  std::string known;
  std::string living;
  std::string others;
  std::vector<int> stuck;
  std::string cause = "has not answered";
  for (const int rank : missing) {
    const ProcessState state = state_of(rank);
    if (const std::string plight = plight_of(rank); !plight.empty()) {
      known += join("No answer from ", who(rank), ": it ", plight, ". ");
      cause = stuck.empty() ? plight : cause;
      stuck.push_back(rank);
    } else {
      std::string& names = state == ProcessState::kAlive ? living : others;
      names += join(names.empty() ? "No answer from " : ", ", "rank ", rank);
    }
  }
  if (!living.empty()) {
    living += " (late, or still waiting for one of the others). ";
  }
  if (!others.empty()) {
    others += " (late, stopped, dead, or still waiting for one of the others). ";
  }
  const std::vector<int>& guilty = stuck.empty() ? missing : stuck;
  blame = culprit(guilty[0], std::move(cause));
  blame.ranks = guilty;
  std::string sentences = known + living + others;
  sentences.pop_back();
  return sentences;
}

GlooGroup::UnderWay::UnderWay(GlooGroup& group, const Operation& operation, std::uint64_t number)
    : group_(group) {
  const std::chrono::nanoseconds patience = group_.long_wait_;
  {
    const std::lock_guard lock(group_.mutex_);
    self_ = group_.under_way_.insert(
        group_.under_way_.end(), {operation, number, LongWait(patience / 2), LongWait(patience)});
    if (group_.is_looking_ || group_.is_shut_down_ || group_.channel.size() == 1) {
      return;
    }
    group_.is_looking_ = true;
  }
  try {
    EngineThread("pydist-gloo-log", [self = group_.shared_from_this()] {
      self->look_at_waits();
    }).let_go();
  } catch (const std::exception&) {  // no thread: the log says less
    const std::lock_guard lock(group_.mutex_);
    group_.is_looking_ = false;
  }
}

GlooGroup::UnderWay::~UnderWay() {
  const std::lock_guard lock(group_.mutex_);
  group_.under_way_.erase(self_);
}

bool GlooGroup::is_under_way() const {
  const std::lock_guard lock(mutex_);
  return !under_way_.empty();
}

void GlooGroup::look_at_waits() {
  struct Lasting {
    std::string what;
    std::uint64_t number;
    int peer;
  };
  std::unique_lock lock(mutex_);
  while (!is_shut_down_ && !under_way_.empty()) {
    std::uint64_t in = 0;
    std::vector<Lasting> lasting;
    Deadline next = Deadline::in(long_wait_ / 2);
    for (Operating& each : under_way_) {
      if (each.half.is_due(long_wait_ / 2)) {
        in = std::max(in, each.number);
      }
      if (each.whole.is_due(long_wait_)) {
        lasting.push_back({name_of(each.operation), each.number, each.operation.peer});
      }
      next = next.earlier_of(each.half.due()).earlier_of(each.whole.due());
    }
    if (in == 0 && lasting.empty()) {
      quiet_.wait_until(lock, next.when(), [this] { return is_shut_down_; });
      continue;
    }
    lock.unlock();
    if (in != 0) {
      log_errors_of([&] { say_in(in); });
    }
    for (const Lasting& each : lasting) {
      log_line(LogLevel::kWarning,
               long_wait_text(who(channel.rank()), join(each.what, " of group '", name_, "'"),
                              long_wait_, why_long(each.number, each.peer)));
    }
    lock.lock();
  }
  is_looking_ = false;
  quiet_.notify_all();
}

void GlooGroup::say_in(std::uint64_t number) {
  store_->set(in_key(number, channel.rank()), "here");
  // This rank has left the earlier one, which is what others read where nothing is said.
  if (const std::string last = std::exchange(said_, in_key(number, channel.rank()));
      !last.empty()) {
    store_->erase(last);
  }
}

std::string GlooGroup::why_long(std::uint64_t number, int peer) const {
  if (number == 0) {
    if (peer < 0) {
      return {};
    }
    const std::string plight = plight_of(peer);
    return join("it waits for ", who(peer), plight.empty() ? "" : ", which ", plight);
  }
  std::string missing;
  std::string plights;
  try {
    for (int rank = 0; rank < channel.size(); ++rank) {
      if (rank != channel.rank() && !is_told(in_key(number, rank))) {
        missing += join(missing.empty() ? "" : ", ", who(rank));
      }
      if (const std::string plight = rank == channel.rank() ? std::string() : plight_of(rank);
          !plight.empty()) {
        plights += join("; rank ", rank, " ", plight);
      }
    }
  } catch (const std::exception&) {
    return "the job's store does not answer: the process that hosts it may be stopped or dead" +
           plights;
  }
  if (missing.empty()) {
    return "all ranks are in it" + plights;
  }
  return join("these do not wait in it, as they have not come or have left already: ", missing,
              plights);
}

}  // namespace pydist
