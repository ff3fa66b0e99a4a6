// The system calls on TCP sockets that the transport needs. All sockets are non-blocking, close on
// exec and send small frames at once.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/env.h"
#include "memory/file_descriptor.h"
#include "transport/tcp/socket_address.h"

namespace pydist {

// Bytes that stay unacknowledged for so long mean that the peer's host, or the way to it, is gone.
// The host of a process that is stopped acknowledges them; TCP_USER_TIMEOUT, which also counts
// while that process has no room for more, would take it for lost.
inline constexpr std::chrono::milliseconds kUnacknowledged{8'000};
[[nodiscard]] bool has_no_answer(int socket) noexcept;
// How many have been written and are not acknowledged.
[[nodiscard]] std::size_t unacknowledged_bytes(int socket) noexcept;

// Listens on all addresses of this host, on the first free port of the range. Throws TransportError
// where none is free, or the system gives no socket.
[[nodiscard]] FileDescriptor listen_on(const PortRange& ports);
[[nodiscard]] std::uint16_t port_of(int socket);

// Begins to connect. Throws TransportError where the system gives no socket, or refuses at once.
[[nodiscard]] FileDescriptor begin_connect(const SocketAddress& peer);
// What has become of it, once the socket is writable: 0, or why it failed.
[[nodiscard]] int error_of_socket(int socket) noexcept;

// epoll_ctl() with an event that carries `data`. Throws TransportError.
void watch_in(int epoll, int operation, int fd, std::uint32_t events, std::uint64_t data);
// The same; false where that would throw.
[[nodiscard]] bool try_to_watch_in(int epoll, int operation, int fd, std::uint32_t events,
                                   std::uint64_t data) noexcept;

// A connection that waits to be accepted; none where there is none, or where it can't be had.
[[nodiscard]] FileDescriptor accept_one(int listener) noexcept;

// Has a connection that does not leave the machine send as fast as it goes. BBR, where the system
// has it, paces what it sends by what it has measured, which in memory is the processor's time and
// no link: it halves the speed of large messages, or worse. It has no loss to care for here.
void end_pacing(int socket) noexcept;

// Who is at the other end, for people.
[[nodiscard]] std::string peer_text(int socket);

}  // namespace pydist
