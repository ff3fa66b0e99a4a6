#include "transport/tcp/sockets.h"

#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <string_view>

#include "base/error.h"

namespace pydist {
namespace {

// Connections that wait to be accepted: all ranks of a large job come at once.
constexpr int kBacklog = 4096;

void set_option(int socket, int level, int option, int value) noexcept {
  // A hint: where the system does not know it, the connection works all the same.
  static_cast<void>(::setsockopt(socket, level, option, &value, sizeof value));
}

void prepare_stream(int socket) noexcept { set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1); }

FileDescriptor new_socket(int family) {
  FileDescriptor socket(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket && errno != EAFNOSUPPORT) {
    throw system_error("A TCP socket", errno);
  }
  return socket;
}

// Of all addresses of a family.
SocketAddress any_address(int family) {
  return SocketAddress::from_host(family == AF_INET6 ? "::" : "0.0.0.0");
}

}  // namespace

FileDescriptor listen_on(const PortRange& ports) {
  // One socket takes both families, where the system has IPv6 at all.
  for (const int family : {AF_INET6, AF_INET}) {
    for (unsigned port = ports.first; port <= ports.last; ++port) {
      FileDescriptor socket = new_socket(family);
      if (!socket) {
        break;
      }
      if (family == AF_INET6) {
        set_option(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
      }
      set_option(socket.get(), SOL_SOCKET, SO_REUSEADDR, 1);
      const SocketAddress address = any_address(family).with_port(static_cast<std::uint16_t>(port));
      if (::bind(socket.get(), address.data(), address.bytes()) == 0 &&
          ::listen(socket.get(), kBacklog) == 0) {
        return socket;
      }
      if (errno == EADDRNOTAVAIL) {
        break;  // the family is switched off
      }
      if (errno != EADDRINUSE) {
        throw system_error(join("Listening on port ", port), errno);
      }
    }
  }
  throw TransportError(
      ports.first == 0
          ? std::string("The system has no free TCP port to listen on.")
          : join("All ports of PYDIST_PORTS=", ports.first, "-", ports.last,
                 " are in use; each rank of a host needs one of its own: widen the range."));
}

std::uint16_t port_of(int socket) {
  sockaddr_storage own{};
  socklen_t bytes = sizeof own;
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &bytes) != 0) {
    throw system_error("The port of a socket", errno);
  }
  return SocketAddress::from_system(reinterpret_cast<const sockaddr*>(&own), bytes).port();
}

FileDescriptor begin_connect(const SocketAddress& peer) {
  FileDescriptor socket = new_socket(peer.family());
  if (!socket) {
    throw TransportError(join("This host has no ", peer.family() == AF_INET6 ? "IPv6" : "IPv4",
                              ", which the address ", peer.host(), " needs."));
  }
  prepare_stream(socket.get());
  if (::connect(socket.get(), peer.data(), peer.bytes()) != 0 && errno != EINPROGRESS) {
    throw system_error(join("Connecting to ", peer.to_text()), errno);
  }
  return socket;
}

int error_of_socket(int socket) noexcept {
  int error = 0;
  socklen_t bytes = sizeof error;
  return ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &bytes) == 0 ? error : errno;
}

bool try_to_watch_in(int epoll, int operation, int fd, std::uint32_t events,
                     std::uint64_t data) noexcept {
  epoll_event event{};
  event.events = events;
  event.data.u64 = data;
  return ::epoll_ctl(epoll, operation, fd, &event) == 0;
}

void watch_in(int epoll, int operation, int fd, std::uint32_t events, std::uint64_t data) {
  if (!try_to_watch_in(epoll, operation, fd, events, data)) {
    throw system_error("Watching a connection", errno);
  }
}

bool has_no_answer(int socket) noexcept {
  tcp_info info{};
  socklen_t bytes = sizeof info;
  return ::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0 &&
         info.tcpi_unacked != 0 && info.tcpi_last_ack_recv > kUnacknowledged.count();
}

std::size_t unacknowledged_bytes(int socket) noexcept {
  int bytes = 0;
  return ::ioctl(socket, SIOCOUTQ, &bytes) == 0 ? static_cast<std::size_t>(bytes) : 0;
}

FileDescriptor accept_one(int listener) noexcept {
  FileDescriptor socket(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket) {
    prepare_stream(socket.get());
  }
  return socket;
}

void end_pacing(int socket) noexcept {
  std::array<char, 16> name{};  // TCP_CA_NAME_MAX
  socklen_t bytes = name.size();
  if (::getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(), &bytes) != 0 ||
      std::string_view(name.data(), bytes).substr(0, 3) != "bbr") {
    return;
  }
  // The one that every system has, and allows everybody.
  constexpr std::string_view kReno = "reno";
  static_cast<void>(::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, kReno.data(), kReno.size()));
}

std::string peer_text(int socket) {
  sockaddr_storage peer{};
  socklen_t bytes = sizeof peer;
  if (::getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &bytes) != 0) {
    return "an unknown address";
  }
  return SocketAddress::from_system(reinterpret_cast<const sockaddr*>(&peer), bytes).to_text();
}

}  // namespace pydist
