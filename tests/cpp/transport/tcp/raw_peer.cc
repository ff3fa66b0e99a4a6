#include "transport/tcp/raw_peer.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <iterator>
#include <thread>

#include "base/deadline.h"
#include "base/error.h"

namespace pydist::testing {
namespace {

// Of whatever a test waits for: long, since other tests run at the same time.
constexpr std::chrono::seconds kPatience{20};
constexpr int kPatience_ms = 20'000;

bool wait_for(int socket, short events, int wait_ms) {
  pollfd state{socket, events, 0};
  return ::poll(&state, 1, wait_ms) > 0;
}

}  // namespace

SocketPair::SocketPair(int buffer_bytes) {
  int both[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, both) != 0) {
    throw system_error("A pair of sockets", errno);
  }
  engine = FileDescriptor(both[0]);
  test = FileDescriptor(both[1]);
  for (const int socket : both) {
    if (buffer_bytes != 0) {
      ::setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes);
    }
  }
}

std::size_t send_some(int socket, std::string_view bytes) {
  const ssize_t count = ::send(socket, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  return count < 0 ? 0 : static_cast<std::size_t>(count);
}

bool send_all(int socket, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::send(socket, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(count));
    } else if (errno != EAGAIN || !wait_for(socket, POLLOUT, kPatience_ms)) {
      return false;
    }
  }
  return true;
}

std::string receive_some(int socket, std::size_t most) {
  std::string bytes(most, '\0');
  const ssize_t count = ::recv(socket, bytes.data(), bytes.size(), MSG_DONTWAIT);
  bytes.resize(count < 0 ? 0 : static_cast<std::size_t>(count));
  return bytes;
}

std::string receive_all(int socket, std::size_t bytes) {
  std::string all;
  while (all.size() < bytes && is_readable(socket, kPatience_ms)) {
    const std::string piece = receive_some(socket, bytes - all.size());
    if (piece.empty()) {
      break;
    }
    all += piece;
  }
  return all;
}

bool is_readable(int socket, int wait_ms) { return wait_for(socket, POLLIN, wait_ms); }

bool is_closed_soon(int socket) {
  while (is_readable(socket, kPatience_ms)) {
    if (receive_some(socket).empty()) {
      return true;
    }
  }
  return false;
}

bool eventually(const std::function<bool()>& condition) {
  const Deadline deadline = Deadline::in(kPatience);
  while (!condition()) {
    if (deadline.has_passed()) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

std::string frame_text(FrameHeader header, std::string_view payload) {
  header.bytes = static_cast<std::uint32_t>(payload.size());
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + std::string(payload);
}

FileDescriptor connect_raw(const SocketAddress& address) {
  FileDescriptor socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket || ::connect(socket.get(), address.data(), address.bytes()) != 0) {
    throw system_error("Connecting to " + address.to_text(), errno);
  }
  const linger none{1, 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &none, sizeof none);
  ::fcntl(socket.get(), F_SETFL, O_NONBLOCK);
  return socket;
}

FileDescriptor connect_as(const Meeters& meeters, const JobSecret& secret,
                          const SocketAddress& address) {
  FileDescriptor socket = connect_raw(address);
  const DialerHandshake handshake(meeters, secret);
  send_all(socket.get(), handshake.hello());
  const std::string challenge = receive_all(socket.get(), kChallengeBytes);
  if (challenge.size() != kChallengeBytes) {
    return {};
  }
  if (const auto answer = handshake.answer(challenge)) {
    send_all(socket.get(), *answer);
    if (receive_all(socket.get(), kWelcomeBytes) == std::string(1, kWelcome)) {
      return socket;
    }
  }
  return {};
}

std::size_t descriptors_in_use() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

std::byte* RecordingSink::place(const FrameHeader& header, std::uint64_t /*sender*/) {
  if (on_place) {
    on_place(header);
  }
  if (!has_place) {
    return nullptr;
  }
  place_.assign(header.bytes, std::byte{0});
  return place_.data();
}

void RecordingSink::take(const FrameHeader& header, const std::byte* payload,
                         std::uint64_t sender) {
  frames.push_back(
      {header, std::string(reinterpret_cast<const char*>(payload), header.bytes), sender});
  if (on_take) {
    on_take(frames.back());
  }
}

}  // namespace pydist::testing
