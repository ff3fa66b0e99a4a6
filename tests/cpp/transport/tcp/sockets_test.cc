#include "transport/tcp/sockets.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <string>

#include "ranks.h"
#include "transport/tcp/raw_peer.h"

namespace pydist::testing {
namespace {

SocketAddress at_port(std::uint16_t port) {
  return SocketAddress::from_host("127.0.0.1").with_port(port);
}

int option_of(int socket, int level, int name) {
  int value = -1;
  socklen_t bytes = sizeof value;
  EXPECT_EQ(::getsockopt(socket, level, name, &value, &bytes), 0);
  return value;
}

TEST(SocketsTest, ListensOnTheFirstFreePortOfTheRange) {
  // Some port and the one behind it, which nobody has just now.
  for (int tries = 0;; ++tries) {
    const FileDescriptor first = listen_on({});
    const std::uint16_t port = port_of(first.get());
    ASSERT_NE(port, 0);
    if (port == 65535) {
      continue;
    }
    const PortRange range{port, static_cast<std::uint16_t>(port + 1)};
    FileDescriptor second;
    try {
      second = listen_on(range);
    } catch (const TransportError&) {
      ASSERT_LT(tries, 100);  // somebody else has it
      continue;
    }
    EXPECT_EQ(port_of(second.get()), port + 1);
    const ErrorDescription error = error_of([&] { static_cast<void>(listen_on(range)); });
    EXPECT_EQ(error.kind, ErrorKind::kTransport);
    EXPECT_TRUE(contains(error.message,
                         join("All ports of PYDIST_PORTS=", port, "-", port + 1, " are in use")))
        << error.message;
    EXPECT_TRUE(contains(error.message, "widen the range")) << error.message;
    return;
  }
}

std::string congestion_control_of(int socket) {
  std::array<char, 16> name{};
  socklen_t bytes = name.size();
  EXPECT_EQ(::getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(), &bytes), 0);
  return name.data();
}

bool set_congestion_control(int socket, const std::string& name) {
  return ::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name.data(),
                      static_cast<socklen_t>(name.size())) == 0;
}

TEST(SocketsTest, AConnectionThatPacesIsToldNotTo) {
  const FileDescriptor listener = listen_on({});
  const FileDescriptor socket = begin_connect(at_port(port_of(listener.get())));
  for (const std::string& name : {std::string("reno"), std::string("cubic")}) {
    if (set_congestion_control(socket.get(), name)) {
      end_pacing(socket.get());
      EXPECT_EQ(congestion_control_of(socket.get()), name);
    }
  }
  if (!set_congestion_control(socket.get(), "bbr")) {
    GTEST_SKIP() << "this system's TCP has no BBR";
  }
  end_pacing(socket.get());
  EXPECT_EQ(congestion_control_of(socket.get()), "reno");
}

TEST(SocketsTest, AConnectionHoldsBackNothing) {
  const FileDescriptor listener = listen_on({});
  EXPECT_FALSE(accept_one(listener.get()));
  const FileDescriptor dialer = begin_connect(at_port(port_of(listener.get())));
  ASSERT_TRUE(is_readable(listener.get(), 20'000));
  const FileDescriptor accepted = accept_one(listener.get());
  ASSERT_TRUE(accepted);
  EXPECT_EQ(error_of_socket(dialer.get()), 0);
  for (const int socket : {dialer.get(), accepted.get()}) {
    EXPECT_EQ(option_of(socket, IPPROTO_TCP, TCP_NODELAY), 1);
    EXPECT_NE(::fcntl(socket, F_GETFL) & O_NONBLOCK, 0);
    EXPECT_NE(::fcntl(socket, F_GETFD) & FD_CLOEXEC, 0);
  }
  EXPECT_TRUE(contains(peer_text(dialer.get()), "127.0.0.1 port "));
  EXPECT_EQ(peer_text(accepted.get()).find("127.0.0.1 port "), 0u) << peer_text(accepted.get());
  EXPECT_FALSE(accept_one(listener.get()));
}

TEST(SocketsTest, WhoeverDoesNotListenRefuses) {
  std::uint16_t port = 0;
  {
    const FileDescriptor listener = listen_on({});
    port = port_of(listener.get());
  }
  const FileDescriptor dialer = begin_connect(at_port(port));
  int error = 0;
  ASSERT_TRUE(eventually([&] {
    error = error_of_socket(dialer.get());
    return error != 0;
  }));
  EXPECT_EQ(error, ECONNREFUSED);
}

TEST(SocketsTest, ErrorsOfNoSocketAreTold) {
  EXPECT_EQ(error_of_socket(-1), EBADF);
  EXPECT_EQ(peer_text(-1), "an unknown address");
  EXPECT_FALSE(accept_one(-1));
  EXPECT_THROW(static_cast<void>(port_of(-1)), TransportError);
}

}  // namespace
}  // namespace pydist::testing
