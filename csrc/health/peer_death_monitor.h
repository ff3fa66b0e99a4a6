// The monitor: one thread that watches the peers of a process.
//
// Death is seen through a pidfd within milliseconds; a socket would not do, since a forked
// data-loader worker holds it open. A peer that is alive but shows no heartbeat (stopped, swapped
// out, starved) is warned of; where the system cannot tell whether it lives, a heart that stands
// still for long counts as its loss. The thread also answers requests for shared segments, so that
// peers are served whatever the rest of the process does. It never takes the GIL.
//
// Thread safe. Callbacks run on the monitor's thread and must not block.

#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/engine_thread.h"
#include "base/fork.h"
#include "base/log_queue.h"
#include "health/process_page.h"
#include "memory/event_descriptor.h"
#include "memory/file_descriptor.h"

namespace pydist {

class PeerDeathMonitor {
 public:
  // `heartbeat_timeout`: after how long a heart that stands still is a loss, where nothing else
  // tells of a death.
  PeerDeathMonitor(ProcessPage& own_page, std::chrono::milliseconds heartbeat_warning,
                   std::chrono::milliseconds heartbeat_timeout = std::chrono::hours(24));
  PeerDeathMonitor(const PeerDeathMonitor&) = delete;
  PeerDeathMonitor& operator=(const PeerDeathMonitor&) = delete;
  ~PeerDeathMonitor();

  // Calls `callback` whenever `fd` is readable.
  void watch_readable(int fd, std::function<void()> callback);

  struct Peer {
    std::string description;  // "pid 71 on host b"
    const ProcessPage* page = nullptr;
    // The caller keeps whatever holds the page alive for as long as the peer is watched.
    std::shared_ptr<const void> page_owner;
    std::function<void()> on_death;
    std::function<void()> on_silence = nullptr;  // not known to be dead; null: as on_death
  };
  // Watches a process, and reports it once. A pid of 0 (invisible from here) is watched by its
  // heartbeat alone.
  void watch_peer(pid_t pid, Peer peer);

 private:
  struct Readable {
    int fd;
    std::function<void()> callback;
  };
  struct WatchedPeer {
    pid_t pid = 0;
    FileDescriptor pidfd;
    Peer peer;
    bool was_gone = false;  // before anybody could watch it
    // The rest belongs to the monitor's thread.
    bool is_dead = false;  // or silent for too long
    bool is_warned = false;
    std::int64_t beat_ns = 0;
    std::int64_t silence_ns = 0;  // since the last beat, while this thread itself ran
  };

  void run();
  void wake();
  void check_heartbeats();
  void report_death(WatchedPeer& watched);

  const Birth birth_;
  ProcessPage& own_page_;
  const std::chrono::milliseconds heartbeat_warning_;
  const std::chrono::milliseconds heartbeat_timeout_;
  LogQueue log_;  // the thread itself must not wait for a reader
  EventDescriptor wake_fd_;
  std::int64_t last_check_ns_;  // the monitor's thread's
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::vector<Readable> readables_;                  // guarded by mutex_
  std::vector<std::shared_ptr<WatchedPeer>> peers_;  // guarded by mutex_
  EngineThread thread_;
};

}  // namespace pydist
