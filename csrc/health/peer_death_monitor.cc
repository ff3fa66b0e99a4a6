#include "health/peer_death_monitor.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "health/process_state.h"

namespace pydist {
namespace {

constexpr std::chrono::milliseconds kHeartbeatInterval{250};

FileDescriptor open_pidfd(pid_t pid) {
  return FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

}  // namespace

PeerDeathMonitor::PeerDeathMonitor(ProcessPage& own_page,
                                   std::chrono::milliseconds heartbeat_warning,
                                   std::chrono::milliseconds heartbeat_timeout)
    : own_page_(own_page),
      heartbeat_warning_(heartbeat_warning),
      heartbeat_timeout_(heartbeat_timeout),
      last_check_ns_(monotonic_ns()) {
  own_page_.heartbeat_ns.store(monotonic_ns(), std::memory_order_relaxed);
  thread_ = EngineThread("pydist-monitor", [this] { run(); });
}

PeerDeathMonitor::~PeerDeathMonitor() {
  stopping_.store(true, std::memory_order_relaxed);
  if (!birth_.is_inherited()) {
    wake();
  }
  thread_.join();
}

void PeerDeathMonitor::watch_readable(int fd, std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    readables_.push_back({fd, std::move(callback)});
  }
  wake();
}

void PeerDeathMonitor::watch_peer(pid_t pid, Peer peer) {
  auto watched = std::make_shared<WatchedPeer>();
  watched->peer = std::move(peer);
  watched->pid = pid;
  if (pid > 0) {
    watched->pidfd = open_pidfd(pid);
    watched->was_gone = !watched->pidfd && errno == ESRCH;
    if (!watched->pidfd && !watched->was_gone) {
      log_line(LogLevel::kWarning,
               join("cannot watch ", watched->peer.description, " for its death (errno ", errno,
                    "); it is watched by /proc and its heartbeat."));
    }
  }
  {
    const std::lock_guard lock(mutex_);
    peers_.push_back(std::move(watched));
  }
  wake();
}

void PeerDeathMonitor::wake() { wake_fd_.raise(); }

void PeerDeathMonitor::run() {
  while (!stopping_.load(std::memory_order_relaxed)) {
    own_page_.heartbeat_ns.store(monotonic_ns(), std::memory_order_relaxed);
    std::vector<pollfd> waits{{wake_fd_.get(), POLLIN, 0}};
    std::vector<Readable> readables;
    std::vector<std::shared_ptr<WatchedPeer>> watched;
    std::vector<std::shared_ptr<WatchedPeer>> gone;
    {
      const std::lock_guard lock(mutex_);
      readables = readables_;
      for (const auto& peer : peers_) {
        if (!peer->is_dead && (peer->pidfd || peer->was_gone)) {
          (peer->was_gone ? gone : watched).push_back(peer);
        }
      }
    }
    for (const Readable& readable : readables) {
      waits.push_back({readable.fd, POLLIN, 0});
    }
    for (const auto& peer : watched) {
      waits.push_back({peer->pidfd.get(), POLLIN, 0});
    }
    ::poll(waits.data(), waits.size(), static_cast<int>(kHeartbeatInterval.count()));
    if (waits[0].revents != 0) {
      wake_fd_.reset();
    }
    try {
      for (std::size_t i = 0; i < readables.size(); ++i) {
        if (waits[1 + i].revents != 0) {
          readables[i].callback();
        }
      }
      for (std::size_t i = 0; i < watched.size(); ++i) {
        if (waits[1 + readables.size() + i].revents != 0) {
          report_death(*watched[i]);
        }
      }
      for (const auto& peer : gone) {
        report_death(*peer);
      }
      check_heartbeats();
    } catch (const std::exception& error) {
      // Nothing that goes wrong here may end the process.
      log_.post(LogLevel::kError, join("the monitor thread met an error: ", error.what()));
    }
  }
}

void PeerDeathMonitor::report_death(WatchedPeer& watched) {
  watched.is_dead = true;
  watched.peer.on_death();
}

void PeerDeathMonitor::check_heartbeats() {
  std::vector<std::shared_ptr<WatchedPeer>> peers;
  {
    const std::lock_guard lock(mutex_);
    peers = peers_;
  }
  const std::int64_t now = monotonic_ns();
  const auto is_older = [](std::int64_t age, std::chrono::milliseconds limit) {
    return age > std::chrono::nanoseconds(limit).count();
  };
  // Where this process, too, was stopped, its peers' hearts may beat again in a moment.
  const std::int64_t longest = std::chrono::nanoseconds(4 * kHeartbeatInterval).count();
  const std::int64_t passed = std::min(now - std::exchange(last_check_ns_, now), longest);
  for (const auto& watched : peers) {
    const Peer& peer = watched->peer;
    if (watched->is_dead || peer.page->has_departed.load(std::memory_order_relaxed) != 0) {
      continue;
    }
    // Another process writes it: whatever stands there, no difference may overflow.
    const std::int64_t beat =
        std::clamp<std::int64_t>(peer.page->heartbeat_ns.load(std::memory_order_relaxed), 0, now);
    watched->silence_ns = beat == watched->beat_ns ? watched->silence_ns + passed : 0;
    watched->beat_ns = beat;
    const std::int64_t age = now - beat;
    const bool is_stale = is_older(age, heartbeat_warning_);
    if ((is_stale && !watched->is_warned) || !watched->pidfd) {
      const ProcessState state = process_state(watched->pid);
      if (!watched->pidfd && state == ProcessState::kDead) {
        report_death(*watched);
        continue;
      }
      if (is_stale && !watched->is_warned) {
        const std::string_view known = in_words(state);
        log_.post(LogLevel::kWarning, join(peer.description, " has shown no sign of life for ",
                                           std::round(static_cast<double>(age) * 1e-8) / 10.0, " s",
                                           known.empty() ? "" : "; it ", known, "."));
      }
      if (!watched->pidfd && state == ProcessState::kUnknown &&
          is_older(watched->silence_ns, heartbeat_timeout_)) {
        watched->is_dead = true;
        (peer.on_silence ? peer.on_silence : peer.on_death)();
      }
    }
    watched->is_warned = is_stale;
  }
}

}  // namespace pydist
