#include "health/process_identity.h"

#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/deadline.h"
#include "base/digest.h"
#include "base/error.h"
#include "health/process_state.h"
#include "health/text_field.h"
#include "topology/hosts.h"

namespace pydist {

ProcessIdentity ProcessIdentity::own(const std::optional<std::string>& host_id) {
  std::error_code ignored;
  ProcessIdentity self;
  Digest machine;
  machine.add(host_identity(host_id));
  machine.add(std::string_view(" "));
  machine.add(std::filesystem::read_symlink("/proc/self/ns/pid", ignored).string());
  self.machine = machine.value();
  self.pid = ::getpid();
  self.started = process_status(::getpid()).started;
  write_text(self.host, host_name());
  return self;
}

std::string ProcessIdentity::description() const { return name_of_process(pid, read_text(host)); }

bool has_ended(std::int64_t pid, std::uint64_t started) {
  const ProcessStatus status = process_status(static_cast<pid_t>(pid));
  return status.state == ProcessState::kDead ||
         (status.state != ProcessState::kUnknown && status.started != started);
}

CheckHope hope_that_live(KnownProcesses processes) {
  if (processes.empty()) {
    return nullptr;
  }
  static constexpr std::chrono::milliseconds kLook{500};
  return [processes = std::move(processes), next_look = Deadline::in(kLook)]() mutable {
    if (!next_look.has_passed()) {
      return;
    }
    for (const auto& [rank, host, pid, started] : processes) {
      if (has_ended(pid, started)) {
        throw PeerLost(
            join("rank ", rank, " (", name_of_process(pid, host),
                 ") has died before the group was made."),
            Blame{
                .ranks = {rank}, .host = host, .pid = static_cast<int>(pid), .cause = "has died"});
      }
    }
    next_look = Deadline::in(kLook);
  };
}

}  // namespace pydist
