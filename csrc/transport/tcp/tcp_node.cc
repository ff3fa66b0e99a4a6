#include "transport/tcp/tcp_node.h"

#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "topology/hosts.h"
#include "topology/rendezvous.h"
#include "transport/tcp/interfaces.h"

namespace pydist {
namespace {

// How often the thread looks whether still somebody polls: at first, and where somebody has at
// every look so far.
constexpr int kLook_ms = 1;
constexpr int kLongestLook_ms = 2;
// How often it looks at deadlines and gives a sign of life.
constexpr std::chrono::milliseconds kBeat{500};
// How long the end waits for the other ends, which have got all, to close their connections too.
constexpr std::chrono::milliseconds kFarewell{1'000};

FileDescriptor new_epoll() {
  FileDescriptor epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll) {
    throw system_error("An epoll descriptor", errno);
  }
  return epoll;
}

}  // namespace

std::string NodeCard::to_text() const {
  std::vector<std::string> parts{name, machine};
  parts.insert(parts.end(), addresses.begin(), addresses.end());
  return pack(parts);
}

NodeCard NodeCard::from_text(const std::string& text) {
  std::vector<std::string> parts;
  try {
    parts = unpack(text);
  } catch (const std::exception&) {
    // Refused below.
  }
  if (parts.size() < 3) {
    throw InvalidUsage(join("'", text, "' is no card of a process on the network."));
  }
  NodeCard card;
  card.name = std::move(parts[0]);
  card.machine = std::move(parts[1]);
  card.addresses.assign(std::make_move_iterator(parts.begin() + 2),
                        std::make_move_iterator(parts.end()));
  return card;
}

TcpNode::TcpNode(const NetworkSettings& settings, LogQueue& log)
    : settings_(settings),
      log_(log),
      listener_(listen_on(settings.ports)),
      meetings_(new_epoll()),
      connections_(new_epoll()),
      thread_set_(new_epoll()),
      sleeper_set_(new_epoll()),
      look_ms_(kLook_ms) {
  listener_not_inherited_.emplace(listener_.get());
  card_.name = random_token();
  card_.machine = machine_identity();
  const std::uint16_t port = port_of(listener_.get());
  for (const SocketAddress& address : told_addresses(settings)) {
    card_.addresses.push_back(address.with_port(port).to_text());
  }
  if (card_.addresses.empty()) {
    throw TransportError("This host has no address by which another one could reach it.");
  }
  watch_in(meetings_.get(), EPOLL_CTL_ADD, wake_fd_.get(), EPOLLIN, kWakeEvent);
  watch_in(meetings_.get(), EPOLL_CTL_ADD, listener_.get(), EPOLLIN, kListenerEvent);
  watch_in(thread_set_.get(), EPOLL_CTL_ADD, meetings_.get(), EPOLLIN, kMeetingsEvent);
  watch_in(thread_set_.get(), EPOLL_CTL_ADD, connections_.get(), EPOLLIN, kConnectionsEvent);
  watch_in(sleeper_set_.get(), EPOLL_CTL_ADD, connections_.get(), EPOLLIN, kConnectionsEvent);
  watch_in(sleeper_set_.get(), EPOLL_CTL_ADD, sleeper_fd_.get(), EPOLLIN, kSleeperEvent);
  thread_ = EngineThread("pydist-network", [this] { run(); });
}

void TcpNode::expect(const std::string& token, const JobSecret& secret) {
  const std::lock_guard lock(mutex_);
  expected_.insert_or_assign(token, secret);
}

void TcpNode::no_longer_expect(const std::string& token) {
  const std::lock_guard lock(mutex_);
  expected_.erase(token);
  for (auto& [name, known] : known_) {
    known.secrets.erase(token);
  }
}

LinkPtr TcpNode::link_to(const NodeCard& peer, const std::string& token, const JobSecret& secret,
                         Link::OnLoss on_loss) {
  const std::lock_guard lock(mutex_);
  if (const auto known = known_.find(peer.name); known != known_.end()) {
    known->second.secrets.insert_or_assign(token, secret);
    return known->second.link;
  }
  auto link = std::make_shared<Link>(
      peer.name, links_.size() + 1,
      [this] {
        // Whoever polls sends it. Who sleeps has to be told, and the thread, which dials. The
        // fence: either who serves next sees what is to be sent (watch_all()), or this caller sees
        // that nobody polls, or that somebody sleeps.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (!is_polled_.load() || is_slept_in_.load()) {
          wake();
        } else {
          is_unsent_left_.store(true, std::memory_order_relaxed);
        }
        wake_sleeper();
      },
      std::move(on_loss));
  links_.push_back(link);
  known_.emplace(peer.name, Known{.link = link, .card = peer, .secrets = {{token, secret}}});
  return link;
}

void TcpNode::connect(const Link& link, Deadline deadline) {
  {
    const std::lock_guard lock(mutex_);
    Known& known = known_.at(link.peer());
    if (known.dialled != 0 || link.is_up() || link.is_lost()) {
      return;
    }
    known.deadline = deadline;
    known.next_try = Deadline::in(std::chrono::nanoseconds(0));
  }
  wake();
}

std::string TcpNode::hindrance(const Link& link) {
  const std::lock_guard lock(mutex_);
  return known_.at(link.peer()).hindrance;
}

void TcpNode::add_sink(std::uint64_t group, FrameSink& sink) {
  const std::lock_guard lock(mutex_);
  sinks_.insert_or_assign(group, &sink);
}

void TcpNode::remove_sink(std::uint64_t group) noexcept {
  if (birth_.is_inherited()) {
    return;  // the parent's
  }
  const std::lock_guard lock(mutex_);
  if (const auto sink = sinks_.find(group); sink != sinks_.end()) {
    for (const LinkPtr& link : links_) {
      link->drop(*sink->second);
    }
    sinks_.erase(sink);
  }
}

void TcpNode::drop(const FrameSink& sink, FrameKind kind) {
  const std::lock_guard lock(mutex_);
  for (const LinkPtr& link : links_) {
    link->drop(sink, kind);
  }
}

void TcpNode::wake() noexcept { wake_fd_.raise(); }

void TcpNode::run() {
  while (!is_stopping_.load()) {
    try {
      const bool has_meetings = wait();
      const std::lock_guard lock(mutex_);
      if (has_meetings) {
        serve_meetings();
      }
      dial_where_due();
      beat();
      if (!is_polled_.load()) {
        serve_frames();
      }
    } catch (const std::exception& error) {  // the system has no memory, or watches no more
      log_.post(LogLevel::kError, join("Serving the network: ", error.what()));
      ::poll(nullptr, 0, kLook_ms);
    }
  }
  // Everybody is to have the goodbye, and all that was sent before.
  const std::lock_guard lock(mutex_);
  tell_all(FrameKind::kGoodbye);
  await_taken();
  for (const LinkPtr& link : links_) {
    link->finish_writing();
  }
  const Deadline deadline = Deadline::in(kFarewell);
  const auto is_open = [](const LinkPtr& link) { return link->is_up(); };
  while (std::any_of(links_.begin(), links_.end(), is_open) && !deadline.has_passed()) {
    serve_frames();
    ::poll(nullptr, 0, kLook_ms);
  }
}

// A connection that is closed while something has come that nobody has read takes back what the
// other end's system has not got. That may lack the room, where its process is slow to read.
void TcpNode::await_taken() {
  std::size_t before = 0;
  Deadline patience = Deadline::in(kUnacknowledged);
  while (!patience.has_passed()) {
    serve_frames();
    std::size_t untaken = 0;
    for (const LinkPtr& link : links_) {
      untaken += link->is_up() ? link->untaken_bytes() : 0;
    }
    if (untaken == 0) {
      return;
    }
    if (std::exchange(before, untaken) != untaken) {
      patience = Deadline::in(kUnacknowledged);
    }
    // One that has been silent for nearly as long already is not given all that time again.
    if (next_beat_.has_passed()) {
      next_beat_ = Deadline::in(kBeat);
      lose_silent_links();
    }
    ::poll(nullptr, 0, kLook_ms);
  }
}

bool TcpNode::wait() {
  std::array<epoll_event, 1> event;
  if (is_polled_.load()) {
    // While somebody sleeps, who leaves will say so.
    int longest_ms = look_ms_;
    {
      const std::lock_guard lock(mutex_);
      if (is_dozing_) {
        longest_ms = static_cast<int>(kBeat.count());
      }
    }
    const int count = ::epoll_wait(meetings_.get(), event.data(), event.size(), longest_ms);
    const std::lock_guard lock(mutex_);
    const std::uint64_t polls = polls_.load(std::memory_order_relaxed);
    const bool is_as_before = std::exchange(seen_polls_, polls) == polls;
    is_dozing_ = is_as_before && is_slept_in_.load();
    if (is_as_before && !is_dozing_) {
      is_polled_.store(false);
    }
    look_ms_ = is_as_before ? kLook_ms : kLongestLook_ms;
    return count > 0;
  }
  Deadline next = Deadline::in(kBeat);
  {
    const std::lock_guard lock(mutex_);
    if (!watch_all()) {
      next = Deadline::in(std::chrono::milliseconds(kLook_ms));
    }
    for (const auto& [name, known] : known_) {
      if (is_to_be_dialled(known)) {
        next = next.earlier_of(known.next_try);
      }
    }
  }
  const auto longest = std::chrono::duration_cast<std::chrono::milliseconds>(
      next.remaining(kBeat) + std::chrono::microseconds(999));
  std::array<epoll_event, 2> events;
  const int count = ::epoll_wait(thread_set_.get(), events.data(), events.size(),
                                 static_cast<int>(longest.count()));
  return std::any_of(events.begin(), events.begin() + std::max(0, count),
                     [](const epoll_event& event) { return event.data.u64 == kMeetingsEvent; });
}

bool TcpNode::watch_all() {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // pairs with the one in link_to()
  bool watches_all = true;
  for (const LinkPtr& link : links_) {
    watches_all = watch(*link) && watches_all;
  }
  if (std::exchange(watches_all_, watches_all) && !watches_all) {
    log_errors_of([this] {
      log_.post(LogLevel::kWarning,
                "The system does not watch all connections (is fs.epoll.max_user_watches too "
                "small?): they are looked at every millisecond, which is slow.");
    });
  }
  return watches_all;
}

bool TcpNode::watch(const Link& link) {
  bool watches_all = true;
  // Level triggered: what is not read, or not sent, is told of again.
  for (const std::unique_ptr<FramedSocket>& socket : link.sockets()) {
    // One that has ended would be told of for ever.
    const std::uint32_t events =
        socket->has_ended() ? 0u : EPOLLIN | (link.has_to_send() ? EPOLLOUT : 0u);
    if (events != socket->watched_events) {
      const int operation = socket->watched_events ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
      if (try_to_watch_in(connections_.get(), operation, socket->fd(), events, link.number())) {
        socket->watched_events = events;
      } else {
        watches_all = false;
      }
    }
  }
  return watches_all;
}

void TcpNode::lose(Known& known, const std::string& why) {
  for (const std::unique_ptr<FramedSocket>& socket : known.link->sockets()) {
    // A child that was forked may keep the connection open, and the system would go on to tell.
    static_cast<void>(::epoll_ctl(connections_.get(), EPOLL_CTL_DEL, socket->fd(), nullptr));
  }
  known.link->lose(why);
  if (is_stopping_.load()) {
    return;  // it is this process that ends, and the other one answers to that
  }
  for (const auto& [group, sink] : sinks_) {
    sink->lose(known.link->number());
  }
  wake_sleeper();
}

void TcpNode::beat() {
  if (!next_beat_.has_passed()) {
    return;
  }
  next_beat_ = Deadline::in(kBeat);
  drop_silent_talks();
  lose_silent_links();
  if (!watches_all_) {
    watch_all();
  }
  if (!is_listening_) {
    watch_in(meetings_.get(), EPOLL_CTL_ADD, listener_.get(), EPOLLIN, kListenerEvent);
    is_listening_ = true;
  }
  tell_all(FrameKind::kHeartbeat);
}

void TcpNode::lose_silent_links() {
  for (const LinkPtr& link : links_) {
    const auto is_silent = [](const auto& socket) { return has_no_answer(socket->fd()); };
    if (std::none_of(link->sockets().begin(), link->sockets().end(), is_silent)) {
      silent_.erase(link->number());
    } else if (!silent_.insert(link->number()).second) {
      // For the second time: after the first, this process itself may just have been stopped for as
      // long.
      lose(known_.at(link->peer()),
           join("nothing has been acknowledged for ", kUnacknowledged.count() / 1000, " s"));
    }
  }
}

void TcpNode::tell_all(FrameKind kind) {
  FrameHeader header;
  header.kind = kind;
  for (const LinkPtr& link : links_) {
    if (link->is_up()) {
      link->send(header);
    }
  }
}

void TcpNode::say_goodbye() noexcept {
  log_errors_of([this] {
    const std::lock_guard lock(mutex_);
    tell_all(FrameKind::kGoodbye);
  });
}

void TcpNode::stop() noexcept {
  if (birth_.is_inherited()) {
    thread_.let_go();
    return;  // the parent's
  }
  is_stopping_.store(true);
  wake();
  thread_.join();
  const std::lock_guard lock(mutex_);
  for (const LinkPtr& link : links_) {
    log_errors_of([&link] { link->lose(""); });
  }
  talks_.clear();
  listener_not_inherited_.reset();
  listener_ = FileDescriptor();
}

}  // namespace pydist
