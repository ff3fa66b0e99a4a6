#include "health/known_processes.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <string_view>
#include <utility>

#include "base/deadline.h"
#include "health/process_identity.h"
#include "topology/hosts.h"

namespace pydist {

std::string KnownProcess::who() const {
  return pid == 0 ? join("rank ", rank)
                  : join("rank ", rank, " (", name_of_process(pid, host), ")");
}

ProcessState KnownProcess::state() const noexcept {
  const ProcessStatus status = process_status(local_pid);
  const bool is_another = status.started != 0 && started != 0 && status.started != started;
  return is_another ? ProcessState::kDead : status.state;
}

Blame KnownProcess::blame(std::string cause) const {
  return {.ranks = {rank}, .host = host, .pid = pid, .operation = {}, .cause = std::move(cause)};
}

KnownProcesses strangers(int size) {
  KnownProcesses processes(static_cast<std::size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    processes[static_cast<std::size_t>(rank)].rank = rank;
  }
  return processes;
}

std::string on_numbers(const KnownProcesses& processes) {
  for (std::size_t rank = 0; rank < processes.size(); ++rank) {
    if (processes[rank].rank != static_cast<int>(rank)) {
      return " (Ranks have the numbers of the group that this one is made of.)";
    }
  }
  return {};
}

CheckHope hope_that_live(KnownProcesses processes) {
  std::erase_if(processes,
                [](const KnownProcess& each) { return each.local_pid == 0 || each.started == 0; });
  if (processes.empty()) {
    return nullptr;
  }
  static constexpr std::chrono::milliseconds kLook{500};
  return [processes = std::move(processes), next_look = Deadline::in(kLook)]() mutable {
    if (!next_look.has_passed()) {
      return;
    }
    for (const KnownProcess& each : processes) {
      if (has_ended(each.local_pid, each.started)) {
        throw PeerLost(each.who() + " has died before the group was made.", each.blame("has died"));
      }
    }
    next_look = Deadline::in(kLook);
  };
}

ErrorDescription lateness(const KnownProcesses& processes, const std::string& name,
                          const std::vector<int>& missing) {
  std::string sentence;
  std::vector<KnownProcess> stuck;
  std::vector<KnownProcess> all;
  std::string_view cause = "did not come in time";
  for (const int rank : missing) {
    const KnownProcess& each = processes[static_cast<std::size_t>(rank)];
    const std::string_view plight = in_words(each.state());
    sentence +=
        join(sentence.empty() ? "" : ", ", each.who(), plight.empty() ? "" : ", which ", plight);
    all.push_back(each);
    if (!plight.empty()) {
      cause = stuck.empty() ? plight : cause;
      stuck.push_back(each);
    }
  }
  const char* const advice =
      stuck.size() == all.size()
          ? ""
          : " A rank of which nothing else is said never called, has died where this one cannot "
            "see it, was interrupted, or waits for another one; look at its output first.";
  std::vector<KnownProcess>& guilty = stuck.empty() ? all : stuck;
  std::ranges::sort(guilty, {}, &KnownProcess::rank);
  Blame blame = guilty.front().blame(std::string(cause));
  blame.ranks.clear();
  for (const KnownProcess& each : guilty) {
    blame.ranks.push_back(each.rank);
  }
  return {ErrorKind::kTimeout,
          join("timed out: the group '", name, "' could not be made, as these of its ",
               processes.size(), " ranks did not come in time: ", sentence, ".", advice,
               on_numbers(processes)),
          std::move(blame)};
}

}  // namespace pydist
