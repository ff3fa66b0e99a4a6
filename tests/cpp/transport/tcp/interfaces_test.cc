#include "transport/tcp/interfaces.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/error.h"
#include "ranks.h"

namespace pydist::testing {
namespace {

TEST(InterfacesTest, TheLoopbackIsOneOfThem) {
  const std::vector<NetworkInterface> all = network_interfaces();
  const auto loopback = std::find_if(
      all.begin(), all.end(), [](const NetworkInterface& each) { return each.name == "lo"; });
  ASSERT_NE(loopback, all.end());
  EXPECT_TRUE(loopback->is_loopback);
  EXPECT_TRUE(loopback->is_up);
  ASSERT_FALSE(loopback->addresses.empty());
  EXPECT_EQ(loopback->addresses[0].host(), "127.0.0.1");
  EXPECT_GE(mtu_bytes_of("lo").value_or(0), 1280u);
  EXPECT_EQ(mbit_per_s_of("lo"), std::nullopt);
}

TEST(InterfacesTest, NothingIsKnownOfOneThatThereIsNot) {
  for (const std::string name : {"", "eth77", "a name of more bytes than a name may have"}) {
    EXPECT_EQ(mtu_bytes_of(name), std::nullopt) << name;
    EXPECT_EQ(mbit_per_s_of(name), std::nullopt) << name;
  }
}

TEST(InterfacesTest, OthersAreToldOfAnInterfaceThatIsNamedOrOfTheAddressOfTheJob) {
  NetworkSettings settings;
  settings.address = "10.1.2.3";
  ASSERT_EQ(told_addresses(settings).size(), 1u);
  EXPECT_EQ(told_addresses(settings)[0].host(), "10.1.2.3");
  settings.interfaces = {"lo"};
  ASSERT_EQ(told_addresses(settings).size(), 1u);
  EXPECT_EQ(told_addresses(settings)[0].host(), "127.0.0.1");
}

TEST(InterfacesTest, AnInterfaceHasItsAddress) {
  const std::vector<SocketAddress> loopback = own_addresses({"lo"});
  ASSERT_EQ(loopback.size(), 1u);
  EXPECT_EQ(loopback[0].to_text(), "127.0.0.1 port 0");
  EXPECT_EQ(own_addresses({"lo", "lo"}).size(), 2u);
}

TEST(InterfacesTest, AHostHasSomeAddress) {
  const std::vector<SocketAddress> all = own_addresses({});
  ASSERT_FALSE(all.empty());
  const bool has_loopback = all[0].host() == "127.0.0.1" || all[0].host() == "::1";
  for (const SocketAddress& address : all) {
    // The loopback only where there is nothing else.
    EXPECT_EQ(address.host() == "127.0.0.1" || address.host() == "::1", has_loopback)
        << address.host();
    EXPECT_FALSE(contains(address.host(), "%")) << address.host();
  }
}

TEST(InterfacesTest, AWrongInterfaceIsToldWithThoseThatThereAre) {
  for (const std::string name : {"eth77", "", "lo "}) {
    const ErrorDescription error =
        error_of([&] { static_cast<void>(own_addresses({"lo", name})); });
    EXPECT_EQ(error.kind, ErrorKind::kInvalidUsage);
    EXPECT_TRUE(contains(error.message, "PYDIST_INTERFACE names '" + name + "'")) << error.message;
    EXPECT_TRUE(contains(error.message, "It has: lo")) << error.message;
  }
}

}  // namespace
}  // namespace pydist::testing
