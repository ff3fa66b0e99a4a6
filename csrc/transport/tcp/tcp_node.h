// What a process is on the network: it listens, has links to other processes, and a thread that
// serves them.
//
// Note [Who serves the network]
// Whoever waits for another host polls the connections itself, so that what arrives is seen without
// a thread being woken: that takes time and, where ranks share cores, takes the core of one of
// them. As long as somebody polls who stays, the thread keeps away from the connections, but for a
// look every millisecond or two whether still somebody does; so it is back some 4 ms after the last
// one has gone without a word. One that goes and leaves something unsent says so, and while work
// goes on in the background the thread serves, too. A waiter that goes to sleep hands over to the
// thread, which then waits for the system to tell of something, and rings the doorbells of those
// that wait for it. Where nobody but this process rings its doorbell, a waiter sleeps in the
// network itself, and is woken once where the thread and then the waiter would be. One at a time
// does: the others leave all that comes to it.
//
// Thread safe. Sinks and callbacks run on the thread that serves, which holds the right to: they
// must not wait, and must not call add_sink() or remove_sink().

#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/engine_thread.h"
#include "base/env.h"
#include "base/fork.h"
#include "base/log_queue.h"
#include "memory/event_descriptor.h"
#include "memory/file_descriptor.h"
#include "memory/job_secret.h"
#include "transport/tcp/conversation.h"
#include "transport/tcp/link.h"
#include "transport/tcp/sockets.h"

namespace pydist {

// How others reach a process.
struct NodeCard {
  std::string name;                    // as random_token()
  std::string machine;                 // as machine_identity()
  std::vector<std::string> addresses;  // SocketAddress::to_text()

  [[nodiscard]] std::string to_text() const;
  // Throws InvalidUsage where it is none.
  [[nodiscard]] static NodeCard from_text(const std::string& text);
};

class TcpNode {
 public:
  // Throws TransportError where the system gives no socket, port or thread, InvalidUsage where the
  // settings name interfaces that there are not.
  TcpNode(const NetworkSettings& settings, LogQueue& log);
  TcpNode(const TcpNode&) = delete;
  TcpNode& operator=(const TcpNode&) = delete;
  ~TcpNode() { stop(); }

  [[nodiscard]] const NodeCard& card() const noexcept { return card_; }

  // Lets those connect who know the secret of a token.
  void expect(const std::string& token, const JobSecret& secret);
  void no_longer_expect(const std::string& token);

  // The link to a process, made at the first call; `on_loss` is that of the first. From now on
  // that process may connect.
  [[nodiscard]] LinkPtr link_to(const NodeCard& peer, const std::string& token,
                                const JobSecret& secret, Link::OnLoss on_loss);
  // Connects to it, unless that has begun, until `deadline`. Both ends may: more connections do no
  // harm. Otherwise a link connects when something is to be sent over it.
  void connect(const Link& link, Deadline deadline);
  // What hinders the link so far, in words; empty where nothing is known to.
  [[nodiscard]] std::string hindrance(const Link& link);

  // `group` is not 0 for a group's sink. A sink must be removed before it goes.
  void add_sink(std::uint64_t group, FrameSink& sink);
  // Once it returns, nobody uses the sink.
  void remove_sink(std::uint64_t group) noexcept;
  // Drops what is still to come of frames of that kind that the sink has given a place. Once it
  // returns, nobody writes there.
  void drop(const FrameSink& sink, FrameKind kind);

  // Serves the connections, unless another thread does; returns whether anything has come. With
  // `stays` the thread keeps away: the caller will call again soon, hand_over(), or end_polling().
  bool poll(bool stays);
  // For who has polled, and does not wait any more: what is still to be sent is the thread's. What
  // comes may wait until it is back by itself.
  void end_polling() noexcept;
  // Announces that this thread is about to sleep in the network. Between construction and sleep()
  // the caller looks at what it waits for once more: from construction on nobody else serves, and
  // wake_sleeper() wakes it.
  class Sleeper {
   public:
    explicit Sleeper(TcpNode& node);
    ~Sleeper();
    Sleeper(const Sleeper&) = delete;
    Sleeper& operator=(const Sleeper&) = delete;

    // False where another thread sleeps here, or the system watches no more connections: the
    // caller has to sleep elsewhere.
    [[nodiscard]] bool may_sleep() const noexcept { return may_sleep_; }
    // Serves the connections once something comes, or has waited to be sent and can be; returns
    // after `longest` at the latest, by wake_sleeper(), or by a signal. To be called once.
    void sleep(std::chrono::nanoseconds longest) noexcept;

   private:
    TcpNode& node_;
    bool may_sleep_;
  };
  // Wakes who sleeps here. Call after the change is published.
  void wake_sleeper() noexcept;
  // From now on the thread serves; where somebody sleeps here, once that is over.
  void hand_over() noexcept;

  // Tells all that this process now ends in good order.
  void say_goodbye() noexcept;
  // Sends what waits to be sent, says goodbye, and ends the thread. Idempotent.
  void stop() noexcept;

 private:
  struct Known {
    LinkPtr link;
    NodeCard card;
    // Of the groups that both are in: any will do to meet.
    std::map<std::string, JobSecret> secrets{};
    Deadline deadline = Deadline::in(std::chrono::nanoseconds(0));  // of connecting
    std::size_t dialled = 0;   // connections that this end has made, or that are on their way
    std::size_t failures = 0;  // in a row
    Deadline next_try = Deadline::in(std::chrono::nanoseconds(0));
    std::size_t next_address = 0;
    std::string hindrance{};
  };
  struct Talk {
    Conversation conversation;
    std::string address;  // of the other end, where this one dials
  };
  using Talks = std::map<std::uint64_t, Talk>;

  void run();
  void wake() noexcept;
  // What meetings_ tells of besides talks, by numbers of their own.
  static constexpr std::uint64_t kWakeEvent = 0;
  static constexpr std::uint64_t kListenerEvent = ~std::uint64_t{0};
  // What thread_set_ and sleeper_set_ tell of.
  static constexpr std::uint64_t kMeetingsEvent = 0;
  static constexpr std::uint64_t kConnectionsEvent = 1;
  static constexpr std::uint64_t kSleeperEvent = 2;

  // Waits until something happens, while this thread serves; or at most a moment, while others do.
  // Returns whether meetings_ has something.
  [[nodiscard]] bool wait();
  // With mutex_: what meetings_ tells of.
  void serve_meetings();
  // Stops listening where the system has no descriptor to accept with, until the next beat.
  void pause_listening() noexcept;
  // Whether it is on this machine, in a container or namespace of its own.
  [[nodiscard]] bool is_here(const Known& known) const;
  [[nodiscard]] std::size_t sockets_to(const Known& known) const;
  [[nodiscard]] bool is_to_be_dialled(const Known& known) const;
  void dial_where_due();
  void dial(Known& known);
  void accept_all();
  void begin_talk(Talk talk);
  void advance(Talks::iterator talk);
  void drop_silent_talks();
  void end_talk(Talks::iterator talk, Conversation::State state);
  void beat();
  void tell_all(FrameKind kind);
  // With mutex_.
  bool serve_frames();
  bool serve(Link& link);
  // Logs what it throws, since the system has no memory.
  template <typename Serve>
  bool try_to_serve(const Serve& serve) noexcept;
  // With mutex_: the thread is to leave the connections to the caller.
  void keep_thread_away() noexcept;
  // With mutex_: nobody sleeps any more.
  void end_sleep() noexcept;
  void await_taken();
  void lose_silent_links();
  // With mutex_. False where the system watches no more connections; to be tried again.
  [[nodiscard]] bool watch(const Link& link);
  // The same of all. Logs when it begins to be false.
  bool watch_all();
  void lose(Known& known, const std::string& why);
  void warn_of_stranger(const std::string& who, const std::string& why);

  const Birth birth_;
  const NetworkSettings settings_;
  LogQueue& log_;
  FileDescriptor listener_;
  std::optional<NotInherited> listener_not_inherited_;
  NodeCard card_;
  EventDescriptor wake_fd_;
  EventDescriptor sleeper_fd_;
  FileDescriptor meetings_;     // epoll: wake_fd_, listener_ and the talks
  FileDescriptor connections_;  // epoll: all connections
  FileDescriptor thread_set_;   // epoll: meetings_ and connections_
  FileDescriptor sleeper_set_;  // epoll: connections_ and sleeper_fd_
  // Changed with mutex_: whether the thread stays away, and whether somebody sleeps.
  std::atomic<bool> is_polled_{false};
  std::atomic<bool> is_slept_in_{false};
  std::atomic<std::uint64_t> polls_{0};
  // Whether who polls has been left something to send. Changed by anybody.
  std::atomic<bool> is_unsent_left_{false};
  std::atomic<bool> is_stopping_{false};
  std::mutex mutex_;                           // the right to serve
  std::map<std::string, Known> known_;         // by name; guarded by mutex_
  std::vector<LinkPtr> links_;                 // by number - 1; guarded by mutex_
  std::map<std::string, JobSecret> expected_;  // by token; guarded by mutex_
  std::map<std::uint64_t, FrameSink*> sinks_;  // by group; guarded by mutex_
  Talks talks_;                                // by number, from 1; guarded by mutex_
  std::set<std::uint64_t> silent_;             // links, at the last beat; guarded by mutex_
  bool is_listening_ = true;                   // guarded by mutex_
  bool watches_all_ = true;                    // guarded by mutex_
  std::uint64_t last_talk_ = 0;                // guarded by mutex_
  std::size_t strangers_ = 0;                  // that have been dropped; guarded by mutex_
  Deadline next_warning_ = Deadline::in(std::chrono::nanoseconds(0));  // guarded by mutex_
  Deadline next_beat_ = Deadline::in(std::chrono::nanoseconds(0));     // guarded by mutex_
  std::uint64_t seen_polls_ = 0;                                       // the thread's
  int look_ms_;                                                        // the thread's
  bool is_dozing_ = false;         // the thread, while somebody sleeps; guarded by mutex_
  bool is_hand_over_due_ = false;  // to the thread, once nobody sleeps; guarded by mutex_
  EngineThread thread_;
};

}  // namespace pydist
