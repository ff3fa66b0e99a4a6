#include "memory/segment_exchange.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <thread>

#include "base/error.h"

namespace pydist {
namespace {

// A request is "<nonce> <key> <signature>"; an answer is "<signature>" with a descriptor. See Note
// [Neighbours].
constexpr std::size_t kMaxMessageBytes = 512;
// Who gets no answer asks again: soon at first.
constexpr std::chrono::microseconds kAskAgainFirst{200};
constexpr std::chrono::microseconds kAskAgain{20'000};
// How long a connection may stay open without an answer: a process that was forked meanwhile from
// the server's may hold it.
constexpr std::chrono::seconds kAnswerPatience{1};
// Who floods the server must not keep the monitor's thread, which calls it, from its other work.
constexpr int kRequestsATurn = 64;
// How many connections the server keeps open for what is yet to come. Who comes when there are as
// many asks again, as above.
constexpr std::size_t kMostCallers = 64;
// How long it keeps one at least: longer than an asker waits on one connection.
constexpr std::chrono::seconds kCallerPatience = 2 * kAnswerPatience;
// The system closes the socket of a process that dies before anybody can see the death.
constexpr std::chrono::milliseconds kDeathPatience{200};

struct AbstractAddress {
  sockaddr_un value{};
  socklen_t length = 0;
};

AbstractAddress abstract_address(const std::string& name) {
  AbstractAddress address;
  address.value.sun_family = AF_UNIX;
  PYDIST_CHECK(name.size() + 1 < sizeof(address.value.sun_path));
  // A leading zero byte selects the abstract namespace, which needs no file and no clean-up.
  std::copy(name.begin(), name.end(), address.value.sun_path + 1);
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

FileDescriptor open_socket() {
  FileDescriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) {
    throw system_error("Cannot open a Unix socket", errno);
  }
  return socket;
}

// Whose process is, or listens, at the other end of a connection; nobody's where the kernel does
// not tell.
ucred peer_of(int connection) noexcept {
  ucred peer{.pid = 0, .uid = static_cast<uid_t>(-1), .gid = static_cast<gid_t>(-1)};
  socklen_t length = sizeof peer;
  static_cast<void>(::getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &length));
  return peer;
}

struct Message {
  std::string text;
  FileDescriptor fd;
  bool lacks_fd = false;  // a descriptor was sent, and this process can't have one more
};

enum class Descriptors { kNone, kOne };

enum class Arrival { kMessage, kNothingYet, kEnd };

// The kernel installs descriptors before anybody can look at what comes with them, so there is room
// for no more than are wanted: it drops the others.
Arrival receive(int connection, Descriptors wanted, Message& message) {
  std::array<char, kMaxMessageBytes> text{};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  iovec part{text.data(), text.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (wanted == Descriptors::kOne) {
    header.msg_control = control.data();
    header.msg_controllen = CMSG_LEN(sizeof(int));  // without padding, in which another would fit
  }
  const ssize_t received = ::recvmsg(connection, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (received < 0 && (errno == EAGAIN || errno == EINTR)) {
    return Arrival::kNothingYet;
  }
  if (received <= 0) {
    return Arrival::kEnd;
  }
  message.text.assign(text.data(), static_cast<std::size_t>(received));
  message.fd = FileDescriptor();
  const cmsghdr* const rights = CMSG_FIRSTHDR(&header);
  if (rights != nullptr && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(rights), sizeof fd);
    message.fd = FileDescriptor(fd);
  }
  message.lacks_fd = (header.msg_flags & MSG_CTRUNC) != 0 && !message.fd;
  return Arrival::kMessage;
}

// Sends one message with an optional descriptor; false where that cannot be.
bool send(int connection, const std::string& text, int fd) {
  iovec part{const_cast<char*>(text.data()), text.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (fd >= 0) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
  }
  return ::sendmsg(connection, &header, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

// Has the epoll `set` tell when something comes to `fd`; false where the system has no room.
bool watch(int set, int fd) noexcept {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = fd;
  return ::epoll_ctl(set, EPOLL_CTL_ADD, fd, &event) == 0;
}

FileDescriptor open_epoll() {
  FileDescriptor set(::epoll_create1(EPOLL_CLOEXEC));
  if (!set) {
    throw system_error("Cannot open an epoll", errno);
  }
  return set;
}

// What request and answer are signed for.
std::string signed_text(std::string_view what, std::string_view server, std::string_view nonce,
                        std::string_view key) {
  return join(what, "\n", server, "\n", nonce, "\n", key);
}

}  // namespace

SegmentServer::SegmentServer()
    : socket_(open_socket()), ready_(open_epoll()), address_(join("pydist-", random_token())) {
  const AbstractAddress address = abstract_address(address_);
  if (::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address.value), address.length) !=
      0) {
    throw system_error("Cannot bind a Unix socket", errno);
  }
  if (::listen(socket_.get(), SOMAXCONN) != 0) {
    throw system_error("Cannot listen at a Unix socket", errno);
  }
  if (!watch(ready_.get(), socket_.get())) {
    throw system_error("Cannot wait for connections at a Unix socket", errno);
  }
  spare_ = FileDescriptor(::fcntl(socket_.get(), F_DUPFD_CLOEXEC, 0));
  if (!spare_) {
    throw system_error("Cannot duplicate a file descriptor", errno);
  }
}

void SegmentServer::offer(const std::string& key, int fd, const JobSecret& secret) {
  FileDescriptor duplicate(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!duplicate) {
    throw system_error("Cannot duplicate a file descriptor", errno);
  }
  const std::lock_guard lock(mutex_);
  offers_.insert_or_assign(key, Offer{std::move(duplicate), secret});
  for (auto caller = callers_.begin(); caller != callers_.end();) {
    const bool waits = !caller->second.request || answer(caller->second) == Outlook::kWaits;
    caller = waits ? std::next(caller) : forget(caller);
  }
}

void SegmentServer::withdraw(const std::string& key) {
  const std::lock_guard lock(mutex_);
  offers_.erase(key);
}

void SegmentServer::serve() {
  const std::lock_guard lock(mutex_);
  if (!spare_) {
    spare_ = FileDescriptor(::fcntl(socket_.get(), F_DUPFD_CLOEXEC, 0));
  }
  for (auto caller = callers_.begin(); caller != callers_.end();) {
    caller = caller->second.patience.has_passed() ? forget(caller) : std::next(caller);
  }
  std::array<epoll_event, kRequestsATurn> events{};
  const int count = ::epoll_wait(ready_.get(), events.data(), kRequestsATurn, 0);
  for (int i = 0; i < count; ++i) {
    const int fd = events[static_cast<std::size_t>(i)].data.fd;
    if (fd == socket_.get()) {
      accept_callers();
    } else if (const auto caller = callers_.find(fd);
               caller != callers_.end() && hear(caller->second) == Outlook::kOver) {
      forget(caller);
    }
  }
}

void SegmentServer::accept_callers() {
  for (int count = 0; count < kRequestsATurn; ++count) {
    Caller caller{accept(), std::nullopt, Deadline::in(kCallerPatience)};
    if (!caller.connection) {
      return;
    }
    if (peer_of(caller.connection.get()).uid == ::geteuid() && hear(caller) == Outlook::kWaits) {
      keep(caller);
    }
    // Closes the connection and has a spare again, in one: no other thread can come between.
    if (!spare_ && ::dup3(socket_.get(), caller.connection.get(), O_CLOEXEC) >= 0) {
      spare_ = std::move(caller.connection);
    }
  }
}

// Also where there is no descriptor left: otherwise the socket would stay readable, and keep the
// monitor's thread busy, and this rank from telling others what they need to fail with it.
FileDescriptor SegmentServer::accept() {
  pollfd readable{socket_.get(), POLLIN, 0};
  if (::poll(&readable, 1, 0) <= 0) {
    return {};  // which accept() itself does not tell where there is no descriptor
  }
  const auto take = [this] {
    return FileDescriptor(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  };
  FileDescriptor connection = take();
  if (!connection && errno == EMFILE && spare_) {
    spare_ = FileDescriptor();
    connection = take();
  }
  return connection;
}

std::optional<SegmentServer::Request> SegmentServer::parse(const std::string& text) {
  const auto first = text.find(' ');
  const auto last = text.rfind(' ');
  if (first == last) {
    return std::nullopt;
  }
  return Request{text.substr(0, first), text.substr(first + 1, last - first - 1),
                 text.substr(last + 1)};
}

SegmentServer::Outlook SegmentServer::hear(Caller& caller) {
  Message message;
  const Arrival arrival = receive(caller.connection.get(), Descriptors::kNone, message);
  if (arrival == Arrival::kNothingYet) {
    return Outlook::kWaits;
  }
  const bool is_first = !caller.request;  // a second message breaks the protocol
  caller.request = arrival == Arrival::kMessage && is_first ? parse(message.text) : std::nullopt;
  return caller.request ? answer(caller) : Outlook::kOver;
}

SegmentServer::Outlook SegmentServer::answer(const Caller& caller) {
  const auto& [nonce, key, signature] = *caller.request;
  const auto found = offers_.find(key);
  if (found == offers_.end()) {
    return Outlook::kWaits;
  }
  const auto& [fd, secret] = found->second;
  if (secret.has_signed(signed_text("request", address_, nonce, key), signature)) {
    // A requester that is gone by now needs no answer.
    static_cast<void>(send(caller.connection.get(),
                           secret.sign(signed_text("answer", address_, nonce, key)), fd.get()));
  }
  return Outlook::kOver;
}

// Takes the connection over, unless there are too many, or this one took the last descriptor: then
// the next asker could not even be turned away, and this process may need one to tell the others
// that it has none.
void SegmentServer::keep(Caller& caller) {
  const int fd = caller.connection.get();
  const bool is_another_free = bool(FileDescriptor(::fcntl(fd, F_DUPFD_CLOEXEC, 0)));
  if (spare_ && is_another_free && callers_.size() < kMostCallers && watch(ready_.get(), fd)) {
    callers_.insert_or_assign(fd, std::move(caller));
  }
}

SegmentServer::Callers::iterator SegmentServer::forget(Callers::iterator caller) {
  // Closing alone would not do where a process that was forked meanwhile has the connection, too.
  ::epoll_ctl(ready_.get(), EPOLL_CTL_DEL, caller->first, nullptr);
  return callers_.erase(caller);
}

namespace {

// A connection to the server at `address`; none where too many wait there already.
FileDescriptor connect_to(const std::string& address) {
  FileDescriptor connection = open_socket();
  const AbstractAddress server = abstract_address(address);
  if (::connect(connection.get(), reinterpret_cast<const sockaddr*>(&server.value),
                server.length) != 0) {
    if (errno == EAGAIN || errno == EINTR) {
      return {};
    }
    throw system_error("No process answers at the Unix socket of the peer", errno);
  }
  if (const ucred peer = peer_of(connection.get()); peer.uid != ::geteuid()) {
    throw TransportError(join("The Unix socket of the peer belongs to user ", peer.uid,
                              ", and this process to user ", ::geteuid(), "."));
  }
  return connection;
}

}  // namespace

SegmentRequest::SegmentRequest(std::string address, std::string key, const JobSecret& secret)
    : address_(std::move(address)), key_(std::move(key)), secret_(secret), nonce_(random_token()) {
  try {
    ask();
  } catch (const TransportError&) {
    // await() asks again, and knows more of why.
  }
}

void SegmentRequest::ask() {
  const std::string request =
      join(nonce_, " ", key_, " ", secret_.sign(signed_text("request", address_, nonce_, key_)));
  PYDIST_CHECK(request.size() <= kMaxMessageBytes);
  FileDescriptor connection = connect_to(address_);
  if (connection && send(connection.get(), request, -1)) {
    connection_ = std::move(connection);
  }
}

FetchedSegment SegmentRequest::hear(const std::function<void()>& require_hope) {
  const Deadline patience = Deadline::in(kAnswerPatience);
  while (!patience.has_passed()) {
    pollfd readable{connection_.get(), POLLIN, 0};
    ::poll(&readable, 1, static_cast<int>(kAskAgain / std::chrono::milliseconds(1)));
    Message answer;
    const Arrival arrival = receive(connection_.get(), Descriptors::kOne, answer);
    if (arrival == Arrival::kMessage &&
        secret_.has_signed(signed_text("answer", address_, nonce_, key_), answer.text)) {
      if (answer.lacks_fd) {
        throw system_error("Cannot receive the descriptor of the shared segment '" + key_ + "'",
                           EMFILE);
      }
      if (answer.fd) {
        return {std::move(answer.fd), peer_of(connection_.get()).pid};
      }
    }
    if (arrival == Arrival::kEnd) {
      break;
    }
    require_hope();
  }
  return {};
}

FetchedSegment SegmentRequest::await(Deadline deadline, const std::function<void()>& check_hope) {
  const auto require_hope = [&] {
    if (check_hope) {
      check_hope();
    }
    if (deadline.has_passed()) {
      throw Timeout("A peer did not hand over the shared segment '" + key_ + "' in time.");
    }
  };
  for (auto pause = kAskAgainFirst;; pause = std::min(2 * pause, kAskAgain)) {
    try {
      if (!connection_) {
        ask();
      }
    } catch (const TransportError&) {
      const Deadline seen = Deadline::in(kDeathPatience);
      while (check_hope && !seen.has_passed()) {
        check_hope();  // throws PeerLost, which says more
        std::this_thread::sleep_for(kAskAgainFirst);
      }
      throw;
    }
    if (connection_) {
      if (FetchedSegment fetched = hear(require_hope); fetched.fd) {
        return fetched;
      }
      connection_ = FileDescriptor();
    }
    require_hope();
    std::this_thread::sleep_for(deadline.remaining(pause));
  }
}

}  // namespace pydist
