#include "transport/tcp/socket_address.h"

#include <gtest/gtest.h>

#include <sys/socket.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "ranks.h"

namespace pydist::testing {
namespace {

TEST(SocketAddressTest, TextsComeBack) {
  for (const std::string text :
       {"10.0.0.1 port 4711", "0.0.0.0 port 0", "255.255.255.255 port 65535", "::1 port 1",
        "fe80::1 port 80", "2001:db8::ff00:42:8329 port 29600", ":: port 0"}) {
    const SocketAddress address = SocketAddress::from_text(text);
    EXPECT_EQ(address.to_text(), text);
    EXPECT_EQ(SocketAddress::from_system(address.data(), address.bytes()).to_text(), text);
  }
}

TEST(SocketAddressTest, HostAndPortAreApart) {
  const SocketAddress four = SocketAddress::from_host("192.168.7.1");
  EXPECT_EQ(four.family(), AF_INET);
  EXPECT_EQ(four.port(), 0);
  EXPECT_EQ(four.with_port(8080).port(), 8080);
  EXPECT_EQ(four.with_port(8080).host(), "192.168.7.1");
  EXPECT_EQ(four.port(), 0);
  const SocketAddress six = SocketAddress::from_host("2001:DB8:0:0::1");
  EXPECT_EQ(six.family(), AF_INET6);
  EXPECT_EQ(six.host(), "2001:db8::1");
  EXPECT_EQ(six.with_port(65535).port(), 65535);
}

TEST(SocketAddressTest, AnAddressOfTheOtherFamilyIsWhatItMeans) {
  const SocketAddress address = SocketAddress::from_text("::ffff:10.0.0.1 port 80");
  EXPECT_EQ(address.family(), AF_INET);
  EXPECT_EQ(address.to_text(), "10.0.0.1 port 80");
}

TEST(SocketAddressTest, AScopeIsPartOfTheAddress) {
  const SocketAddress address = SocketAddress::from_host("fe80::1%lo");
  EXPECT_EQ(address.to_text(), "fe80::1%lo port 0");
}

TEST(SocketAddressTest, NamesAreNoAddresses) {
  for (const std::string text : {"localhost", "", " ", "10.0.0", "10.0.0.256", "1.2.3.4.5", "::g",
                                 "10.0.0.1 ", "[::1]", "::1%no such interface", "10.0.0.1:80"}) {
    // A number of three parts is an address to inet_aton(), as it is to the system.
    if (text == "10.0.0") {
      continue;
    }
    try {
      const SocketAddress address = SocketAddress::from_host(text);
      ADD_FAILURE() << "'" << text << "' is taken for " << address.to_text();
    } catch (const InvalidUsage& error) {
      EXPECT_TRUE(contains(error.what(), "'" + text + "'")) << error.what();
    }
  }
}

TEST(SocketAddressTest, TextsWithoutAPortAreRefused) {
  for (const std::string text :
       {"", "10.0.0.1", "10.0.0.1 port", "10.0.0.1 port ", "10.0.0.1 port -1",
        "10.0.0.1 port 65536", "10.0.0.1 port 123456", "10.0.0.1 port 80x", "10.0.0.1 port 0x50",
        "10.0.0.1 port +80", " port 80", "name port 80", "10.0.0.1 port 80 port"}) {
    EXPECT_THROW(static_cast<void>(SocketAddress::from_text(text)), InvalidUsage) << text;
  }
}

}  // namespace
}  // namespace pydist::testing
