#include "health/process_identity.h"

#include <sys/types.h>
#include <unistd.h>

#include <filesystem>
#include <string_view>
#include <system_error>

#include "base/digest.h"
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

}  // namespace pydist
