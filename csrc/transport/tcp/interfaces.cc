#include "transport/tcp/interfaces.h"

#include <ifaddrs.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "memory/file_descriptor.h"

namespace pydist {
namespace {

bool is_link_local(const SocketAddress& address) {
  return address.family() == AF_INET6 &&
         IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(address.data())->sin6_addr);
}

bool is_four(const SocketAddress& address) { return address.family() == AF_INET; }

// Asks the system about an interface; false where it does not know.
bool ask(const std::string& interface, unsigned long what, ifreq& request) {
  const FileDescriptor socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));  // any will do
  interface.copy(&request.ifr_name[0], IFNAMSIZ - 1);
  return socket && ::ioctl(socket.get(), what, &request) == 0;
}

std::string names_of(const std::vector<NetworkInterface>& interfaces) {
  std::string names;
  for (const NetworkInterface& each : interfaces) {
    if (each.is_up && !each.addresses.empty()) {
      names += (names.empty() ? "" : ", ") + each.name;
    }
  }
  return names.empty() ? "none" : names;
}

}  // namespace

std::vector<NetworkInterface> network_interfaces() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) {
    throw system_error("The addresses of this host", errno);
  }
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(first, &::freeifaddrs);
  std::vector<NetworkInterface> interfaces;
  for (const ifaddrs* each = first; each != nullptr; each = each->ifa_next) {
    auto found =
        std::find_if(interfaces.begin(), interfaces.end(),
                     [&](const NetworkInterface& one) { return one.name == each->ifa_name; });
    if (found == interfaces.end()) {
      NetworkInterface fresh;
      fresh.name = each->ifa_name;
      fresh.is_loopback = (each->ifa_flags & IFF_LOOPBACK) != 0;
      fresh.is_up = (each->ifa_flags & IFF_UP) != 0;
      fresh.is_running = (each->ifa_flags & IFF_RUNNING) != 0;
      found = interfaces.insert(interfaces.end(), std::move(fresh));
    }
    const int family = each->ifa_addr == nullptr ? AF_UNSPEC : each->ifa_addr->sa_family;
    if (family == AF_INET || family == AF_INET6) {
      const SocketAddress address = SocketAddress::from_system(
          each->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
      if (!is_link_local(address)) {
        found->addresses.push_back(address);
      }
    }
  }
  for (NetworkInterface& each : interfaces) {
    // Where there is a choice, the shorter headers.
    std::stable_partition(each.addresses.begin(), each.addresses.end(), &is_four);
  }
  return interfaces;
}

std::optional<std::size_t> mtu_bytes_of(const std::string& interface) {
  ifreq request{};
  if (!ask(interface, SIOCGIFMTU, request)) {
    return std::nullopt;
  }
  return static_cast<std::size_t>(request.ifr_mtu);
}

std::optional<std::uint32_t> mbit_per_s_of(const std::string& interface) {
  ethtool_cmd settings{};
  settings.cmd = ETHTOOL_GSET;
  ifreq request{};
  request.ifr_data = reinterpret_cast<char*>(&settings);
  if (!ask(interface, SIOCETHTOOL, request)) {
    return std::nullopt;
  }
  const std::uint32_t speed = ethtool_cmd_speed(&settings);
  // By 0, 65535 and 2^32 - 1 drivers say that they do not know.
  if (speed == 0 || speed == UINT16_MAX || speed == UINT32_MAX) {
    return std::nullopt;
  }
  return speed;
}

std::vector<SocketAddress> own_addresses(const std::vector<std::string>& interfaces) {
  const std::vector<NetworkInterface> all = network_interfaces();
  std::vector<SocketAddress> addresses;
  for (const std::string& interface : interfaces) {
    const auto found = std::find_if(all.begin(), all.end(), [&](const NetworkInterface& own) {
      return own.name == interface && own.is_up && !own.addresses.empty();
    });
    if (found == all.end()) {
      throw InvalidUsage(join("PYDIST_INTERFACE names '", interface,
                              "', but this host has no such interface that is up and has an "
                              "address. It has: ",
                              names_of(all), "."));
    }
    addresses.push_back(found->addresses[0]);
  }
  for (const bool takes_loopback : {false, true}) {
    for (const NetworkInterface& own : all) {
      if (interfaces.empty() && own.is_up && own.is_loopback == takes_loopback) {
        addresses.insert(addresses.end(), own.addresses.begin(), own.addresses.end());
      }
    }
    if (!addresses.empty()) {
      break;
    }
  }
  if (interfaces.empty()) {
    std::stable_partition(addresses.begin(), addresses.end(), &is_four);
  }
  return addresses;
}

std::vector<SocketAddress> told_addresses(const NetworkSettings& settings) {
  if (settings.interfaces.empty() && settings.address) {
    return {SocketAddress::from_host(*settings.address)};
  }
  return own_addresses(settings.interfaces);
}

}  // namespace pydist
