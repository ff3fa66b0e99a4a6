#include "c10d/gloo/gloo_death_watch.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <exception>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace pydist {

DeathWatch::DeathWatch(const std::vector<ProcessIdentity>& processes, const ProcessIdentity& self,
                       std::function<void(std::size_t)> on_end)
    : on_end_(std::move(on_end)) {
  for (std::size_t index = 0; index < processes.size(); ++index) {
    const ProcessIdentity& each = processes[index];
    // Where /proc does not tell when a process has started, its number may be another one's.
    if (each.machine != self.machine || each.pid == self.pid || each.started == 0) {
      continue;
    }
    FileDescriptor pidfd(static_cast<int>(::syscall(SYS_pidfd_open, each.pid, 0)));
    const int code = pidfd ? 0 : errno;
    if (code != 0 && code != ESRCH) {
      throw system_error(join("Cannot watch the process of ", each.description()), code);
    }
    if (pidfd && has_ended(each.pid, each.started)) {
      pidfd = FileDescriptor();  // of a later process, maybe
    }
    watched_.push_back({index, std::move(pidfd)});
  }
  if (!watched_.empty()) {
    thread_ = EngineThread("pydist-deaths", [this] { run(); });
  }
}

DeathWatch::~DeathWatch() {
  if (!birth_.is_inherited()) {
    stop_fd_.raise();
  }
  thread_.join();
}

void DeathWatch::run() {
  while (!watched_.empty()) {
    std::vector<pollfd> waits{{stop_fd_.get(), POLLIN, 0}};
    bool has_any_ended = false;
    for (const Watched& each : watched_) {
      waits.push_back({each.pidfd.get(), POLLIN, 0});  // poll() skips those that are negative
      has_any_ended = has_any_ended || !each.pidfd;
    }
    ::poll(waits.data(), waits.size(), has_any_ended ? 0 : -1);
    if (waits[0].revents != 0) {
      return;
    }
    std::vector<std::size_t> ended;
    std::vector<Watched> left;
    for (std::size_t i = 0; i < watched_.size(); ++i) {
      if (!watched_[i].pidfd || waits[1 + i].revents != 0) {
        ended.push_back(watched_[i].index);
      } else {
        left.push_back(std::move(watched_[i]));
      }
    }
    watched_ = std::move(left);
    for (const std::size_t index : ended) {
      try {
        on_end_(index);
      } catch (const std::exception& error) {
        // Nothing that goes wrong here may end the process.
        log_line(LogLevel::kError, join("the watch over processes met an error: ", error.what()));
      }
    }
  }
}

}  // namespace pydist
