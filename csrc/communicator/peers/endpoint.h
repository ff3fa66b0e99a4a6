// Everything by which peers know a process, whatever groups they share: its page (heartbeat,
// journal), its doorbell, the server that hands out its segments, the monitor and the progress
// thread; and where peers are on other hosts, what it is on the network.
//
// One a process in production; tests give each thread that plays a rank one of its own. Thread
// safe. Threads start when they are first needed: a world of one has none.

#pragma once

#include <sys/types.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/env.h"
#include "base/fork.h"
#include "base/log_queue.h"
#include "communicator/peers/wait_loop.h"
#include "health/doorbell.h"
#include "health/peer_death_monitor.h"
#include "health/process_page.h"
#include "memory/allocation_heap.h"
#include "memory/heap_window.h"
#include "memory/job_secret.h"
#include "memory/process_memory.h"
#include "memory/segment_exchange.h"
#include "memory/shared_segment.h"
#include "topology/rendezvous.h"
#include "transport/tcp/tcp_node.h"

namespace pydist {

// What a process tells the others before they can meet. All of it travels through the store.
struct Card {
  std::string address;  // of the segment server
  std::string host_identity;
  std::string host_name;
  std::string machine;  // machine_identity()
  pid_t pid = 0;
  std::string pid_namespace;  // in which `pid` counts
  std::uint64_t page_number = 0;
  std::string memory_limits;    // as memory_limits()
  std::vector<int> processors;  // that it may run on
  std::optional<double> processor_quota;

  [[nodiscard]] std::string to_text() const;
  [[nodiscard]] static Card from_text(const std::string& text);
};

// What a process has to know of one on another host, besides how it is reached.
struct Acquaintance {
  std::string host_name;
  pid_t pid = 0;  // as it knows itself
  std::uint64_t page_number = 0;
};

// What the ranks of one group have in common when they meet, and nobody else.
struct Trust {
  std::string token;  // what the keys of their segments begin with
  JobSecret secret;   // of their offers
};

// Another process: of this host, met face to face, or of another one, behind a link.
struct Peer {
  std::string description;  // "pid 71 on host b"
  std::string host;
  int pid = 0;          // as it knows itself
  pid_t local_pid = 0;  // as this process knows it; 0 where it does not see it
  SharedSegment page_segment;
  SharedSegment doorbell_segment;
  // Of one on another host: what has been heard of its page, and a bell that nobody hears.
  std::unique_ptr<ProcessPage> mirror;
  std::unique_ptr<Doorbell> mute_doorbell;
  LinkPtr link;
  std::string loss;  // with is_dead: why it can't be reached; empty where it has ended
  std::atomic<bool> has_said_goodbye{false};

  const ProcessPage* page = nullptr;
  Doorbell* doorbell = nullptr;
  HeapWindow window;  // of one of this host, once it shares its allocations
  std::atomic<bool> is_dead{false};
  // With is_dead: nobody can tell, but its heart has not beaten for long.
  std::atomic<bool> is_silent{false};

  // Of one of this host; whether it can be read the system decides.
  [[nodiscard]] ProcessMemory memory() const noexcept {
    return {local_pid, page->number_address.load(std::memory_order_relaxed),
            page->number.load(std::memory_order_relaxed)};
  }
  // It has shut down, or will soon, in good order.
  [[nodiscard]] bool has_departed() const noexcept {
    return has_said_goodbye.load(std::memory_order_acquire) ||
           page->has_departed.load(std::memory_order_acquire) != 0;
  }
  // Dead without having shut down.
  [[nodiscard]] bool has_crashed() const noexcept {
    return is_dead.load(std::memory_order_acquire) && !has_departed();
  }
};
using PeerPtr = std::shared_ptr<Peer>;

// What a process of this host has been asked for, ahead of meeting it.
struct PeerRequest {
  SegmentRequest page;
  SegmentRequest doorbell;
};

class RemoteRanks;

class Endpoint {
 public:
  explicit Endpoint(const Environment& environment);
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;
  ~Endpoint();

  // The one of this process; made at the first call.
  [[nodiscard]] static std::shared_ptr<Endpoint> of_process(const Environment& environment);
  // The same; null where there is none yet.
  [[nodiscard]] static std::shared_ptr<Endpoint> of_process_if_any();
  // Lets go of it: once the last group is closed, its threads and its socket are gone, also where
  // the program still holds a group; its segments go with the last group.
  static void release_process() noexcept;
  // Shows this process's rank in its job, also on the page that is made later; -1: it is in none.
  static void show_rank(int rank) noexcept;
  // Tells the peers of every endpoint of this process that the process now ends in good order, also
  // where something keeps the endpoint alive to the very end.
  static void depart_all() noexcept;

  [[nodiscard]] Card card();
  [[nodiscard]] ProcessPage& page() noexcept { return *page_; }
  [[nodiscard]] Doorbell& doorbell() noexcept { return progress_->doorbell(); }
  [[nodiscard]] SegmentServer& server();
  // For lines of those who drive operations, which must not wait for a reader.
  [[nodiscard]] LogQueue& log() noexcept { return log_; }
  [[nodiscard]] const std::shared_ptr<ProgressThread>& progress() noexcept { return progress_; }

  // Waiters of this process spin no longer than this before they sleep. The least of all groups
  // counts: where one group has more ranks than cores, nobody can afford to spin.
  void limit_spin(std::chrono::nanoseconds spin);

  // Lets those who share `trust` meet this process, as long as the result lives.
  [[nodiscard]] std::vector<SegmentOffer> receive(const Trust& trust);

  // Asks the process that shows `card` for what it takes to meet it. Nothing where it has been met,
  // or is this one.
  [[nodiscard]] std::optional<PeerRequest> ask(const Card& card, const Trust& trust);
  // Meets the process that shows `card`, and receives whoever shares `trust`: proves that both are
  // on one host, maps its page and its doorbell and watches over its life. The same process is met
  // once. `asked`: what ask() has returned. Throws TransportError where they are not on one host,
  // and PeerLost where it has died.
  [[nodiscard]] PeerPtr meet(const Card& card, std::optional<PeerRequest> asked, Deadline deadline,
                             const CheckHope& check_hope = nullptr);
  [[nodiscard]] PeerPtr meet(const Card& card, const Trust& trust, Deadline deadline,
                             const CheckHope& check_hope = nullptr) {
    return meet(card, ask(card, trust), deadline, check_hope);
  }

  // What this process is on the network, made at the first call. `address`: by which it reaches its
  // job, for that call. Throws what TcpNode does.
  [[nodiscard]] std::shared_ptr<TcpNode> open_network(const std::optional<std::string>& address);
  // The same; null where it has not been opened.
  [[nodiscard]] std::shared_ptr<TcpNode> network();
  // Meets a process of another host. Nothing is sent before the link is used, or told to connect.
  // The network is open.
  [[nodiscard]] PeerPtr meet_over_network(const Acquaintance& process, const NodeCard& node_card,
                                          const Trust& trust);

  // Keeps what a group that this process has let go of has to do for other ranks of its host, until
  // these have let go of it, too.
  void keep_serving(std::shared_ptr<RemoteRanks> remote);

  // The heap by which this process shares its allocations; null while it does not.
  [[nodiscard]] std::shared_ptr<AllocationHeap> allocation_heap() {
    const std::lock_guard lock(mutex_);
    return allocation_heap_;
  }
  void keep_allocation_heap(std::shared_ptr<AllocationHeap> heap) {
    const std::lock_guard lock(mutex_);
    allocation_heap_ = std::move(heap);
  }

  // Shows the peers that this process waits for rank `rank` of `group`, before it has met it there.
  // Not where it does not know it from another group.
  void show_awaited(const std::string& group, int rank, std::string_view host, int pid);
  void show_awaiting_nobody() noexcept { page_->awaited.clear(); }

  // Grows whenever a peer is found dead.
  [[nodiscard]] std::uint64_t deaths() const noexcept {
    return deaths_->load(std::memory_order_acquire);
  }

 private:
  // Lets go of what keep_serving() keeps and nobody needs any more.
  void end_served();

  // Null where it has not been met.
  [[nodiscard]] PeerPtr known_peer(const Card& card);

  friend class EndpointUse;
  class ProcessFrames;

  // That the process ends from now on is no crash.
  void depart() noexcept;
  // Ends the threads and the socket. Idempotent.
  void retire() noexcept;
  void begin_use();
  void end_use() noexcept;

  const Birth birth_;
  const Environment environment_;
  const std::string host_identity_;
  LogQueue log_;
  SharedSegment page_segment_;
  SharedSegment doorbell_segment_;
  ProcessPage* page_ = nullptr;
  std::shared_ptr<std::atomic<std::uint64_t>> deaths_;
  std::shared_ptr<ProgressThread> progress_;
  std::mutex mutex_;
  std::unique_ptr<SegmentServer> server_;                    // guarded by mutex_
  std::shared_ptr<ProcessFrames> frames_;                    // guarded by mutex_
  std::shared_ptr<TcpNode> network_;                         // guarded by mutex_
  std::vector<std::shared_ptr<RemoteRanks>> still_serving_;  // guarded by mutex_
  std::shared_ptr<AllocationHeap> allocation_heap_;          // guarded by mutex_
  // By address, or where they are on other hosts by NodeCard::name; guarded by mutex_.
  std::map<std::string, PeerPtr> peers_;
  std::optional<std::chrono::nanoseconds> spin_;  // guarded by mutex_
  int uses_ = 0;                                  // guarded by mutex_
  bool is_released_ = false;                      // guarded by mutex_
  std::unique_ptr<PeerDeathMonitor> monitor_;     // guarded by mutex_; destroyed first
};

// What a group, or its meeting, has while it needs the endpoint's threads and socket.
class EndpointUse {
 public:
  EndpointUse() = default;
  // Throws Aborted where the process has left its job meanwhile, so that they are gone.
  explicit EndpointUse(std::shared_ptr<Endpoint> endpoint);
  EndpointUse(EndpointUse&&) noexcept = default;
  EndpointUse& operator=(EndpointUse&& other) noexcept {
    end();
    endpoint_ = std::move(other.endpoint_);
    return *this;
  }
  ~EndpointUse() { end(); }

  void end() noexcept;

 private:
  std::shared_ptr<Endpoint> endpoint_;
};

}  // namespace pydist
