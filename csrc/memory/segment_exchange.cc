#include "memory/segment_exchange.h"

#include <fcntl.h>
#include <poll.h>
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

#include "base/error.h"

namespace pydist {
namespace {

// A request is "<nonce> <key> <signature>", from the socket "pydist-<nonce>"; an answer is
// "<signature>" with a descriptor. See Note [Neighbours].
constexpr std::size_t kMaxMessageBytes = 512;
// What was lost, or came too early, is asked again: soon at first.
constexpr std::chrono::milliseconds kAskAgainFirst{1};
constexpr std::chrono::milliseconds kAskAgain{20};
// Who floods the server must not keep the monitor's thread, which calls it, from its other work.
constexpr int kRequestsATurn = 64;

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

FileDescriptor open_socket(const std::string& name) {
  FileDescriptor socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) {
    throw system_error("Cannot open a Unix socket", errno);
  }
  const int on = 1;
  if (::setsockopt(socket.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof on) != 0) {
    throw system_error("Cannot ask a Unix socket for credentials", errno);
  }
  const AbstractAddress address = abstract_address(name);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address.value), address.length) !=
      0) {
    throw system_error("Cannot bind a Unix socket", errno);
  }
  return socket;
}

struct Message {
  std::string text;
  FileDescriptor fd;
  bool lacks_fd = false;  // a descriptor was sent, and this process can't have one more
  ucred sender{};
  AbstractAddress from;
};

enum class Descriptors { kNone, kOne };

// One datagram; false when none waits. The kernel installs descriptors before anybody can look at
// who sends them, so there is room for no more than are wanted: it drops the others.
bool receive(int socket, Descriptors wanted, Message& message) {
  std::array<char, kMaxMessageBytes> text{};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(ucred)) + CMSG_SPACE(sizeof(int))> control{};
  iovec part{text.data(), text.size()};
  msghdr header{};
  header.msg_name = &message.from.value;
  header.msg_namelen = sizeof message.from.value;
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  // Without the padding behind the last one, in which another would fit.
  header.msg_controllen = wanted == Descriptors::kOne
                              ? CMSG_SPACE(sizeof(ucred)) + CMSG_LEN(sizeof(int))
                              : CMSG_LEN(sizeof(ucred));
  const ssize_t received = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (received < 0) {
    return false;
  }
  message.text.assign(text.data(), static_cast<std::size_t>(received));
  message.from.length = header.msg_namelen;
  message.fd = FileDescriptor();
  for (cmsghdr* part_header = CMSG_FIRSTHDR(&header); part_header != nullptr;
       part_header = CMSG_NXTHDR(&header, part_header)) {
    if (part_header->cmsg_level != SOL_SOCKET) {
      continue;
    }
    if (part_header->cmsg_type == SCM_RIGHTS) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part_header), sizeof fd);
      message.fd = FileDescriptor(fd);
    } else if (part_header->cmsg_type == SCM_CREDENTIALS) {
      std::memcpy(&message.sender, CMSG_DATA(part_header), sizeof message.sender);
    }
  }
  message.lacks_fd = (header.msg_flags & MSG_CTRUNC) != 0 && !message.fd;
  return true;
}

// Sends one datagram with an optional descriptor; returns 0 or errno.
int send(int socket, const AbstractAddress& to, const std::string& text, int fd) {
  iovec part{const_cast<char*>(text.data()), text.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
  header.msg_name = const_cast<sockaddr_un*>(&to.value);
  header.msg_namelen = to.length;
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
  return ::sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0 ? 0 : errno;
}

bool is_same_user(const ucred& sender) { return sender.uid == ::geteuid(); }

std::string socket_name(std::string_view token) { return join("pydist-", token); }

bool is_from(const Message& message, std::string_view name) {
  const auto named = offsetof(sockaddr_un, sun_path) + 1;
  return message.from.length == named + name.size() && message.from.value.sun_path[0] == '\0' &&
         std::equal(name.begin(), name.end(), message.from.value.sun_path + 1);
}

// What request and answer are signed for.
std::string signed_text(std::string_view what, std::string_view server, std::string_view nonce,
                        std::string_view key) {
  return join(what, "\n", server, "\n", nonce, "\n", key);
}

}  // namespace

SegmentServer::SegmentServer() : address_(socket_name(random_token())) {
  socket_ = open_socket(address_);
}

void SegmentServer::offer(const std::string& key, int fd, const JobSecret& secret) {
  FileDescriptor duplicate(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!duplicate) {
    throw system_error("Cannot duplicate a file descriptor", errno);
  }
  const std::lock_guard lock(mutex_);
  offers_.insert_or_assign(key, Offer{std::move(duplicate), secret});
}

void SegmentServer::withdraw(const std::string& key) {
  const std::lock_guard lock(mutex_);
  offers_.erase(key);
}

void SegmentServer::serve() {
  Message request;
  for (int count = 0; count < kRequestsATurn; ++count) {
    if (!receive(socket_.get(), Descriptors::kNone, request)) {
      return;
    }
    const std::string_view text = request.text;
    const auto first = text.find(' ');
    const auto last = text.rfind(' ');
    if (first == last || !is_same_user(request.sender)) {
      continue;
    }
    const std::string_view nonce = text.substr(0, first);
    const std::string key(text.substr(first + 1, last - first - 1));
    const std::lock_guard lock(mutex_);
    const auto found = offers_.find(key);
    if (found == offers_.end() || !is_from(request, socket_name(nonce))) {
      continue;
    }
    const auto& [fd, secret] = found->second;
    if (secret.has_signed(signed_text("request", address_, nonce, key), text.substr(last + 1))) {
      // A requester that cannot take the answer now asks again.
      static_cast<void>(send(socket_.get(), request.from,
                             secret.sign(signed_text("answer", address_, nonce, key)), fd.get()));
    }
  }
}

FetchedSegment fetch_segment(const std::string& address, const std::string& key,
                             const JobSecret& secret, Deadline deadline,
                             const std::function<void()>& check_hope) {
  const std::string nonce = random_token();
  const FileDescriptor socket = open_socket(socket_name(nonce));
  const AbstractAddress server = abstract_address(address);
  const std::string request =
      join(nonce, " ", key, " ", secret.sign(signed_text("request", address, nonce, key)));
  PYDIST_CHECK(request.size() <= kMaxMessageBytes);
  const std::string expected = signed_text("answer", address, nonce, key);
  for (auto pause = kAskAgainFirst;; pause = std::min(2 * pause, kAskAgain)) {
    const int code = send(socket.get(), server, request, -1);
    if (code != 0 && code != EAGAIN && code != EINTR && code != ENOBUFS) {
      throw system_error("No process answers at the Unix socket of the peer", code);
    }
    const Deadline ask_again = Deadline::in(pause);
    while (!ask_again.has_passed()) {
      pollfd readable{socket.get(), POLLIN, 0};
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(ask_again.remaining(pause));
      ::poll(&readable, 1, static_cast<int>(left.count()));
      Message answer;
      if (!receive(socket.get(), Descriptors::kOne, answer)) {
        continue;
      }
      if (!is_same_user(answer.sender) || !secret.has_signed(expected, answer.text)) {
        continue;
      }
      if (answer.lacks_fd) {
        throw system_error("Cannot receive the descriptor of the shared segment '" + key + "'",
                           EMFILE);
      }
      if (answer.fd) {
        return {std::move(answer.fd), answer.sender.pid};
      }
    }
    if (check_hope) {
      check_hope();
    }
    if (deadline.has_passed()) {
      throw Timeout("A peer did not hand over the shared segment '" + key + "' in time.");
    }
  }
}

}  // namespace pydist
