// The network interfaces of this host, and the addresses that it gives to others. Values.
//
// The system calls that tell of them answer for the network namespace of this process. /sys does
// not: it shows the interfaces of the namespace in which it was mounted.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/env.h"
#include "transport/tcp/socket_address.h"

namespace pydist {

struct NetworkInterface {
  std::string name;
  bool is_loopback = false;
  // Whether it is switched on, and whether it has a link as well.
  bool is_up = false;
  bool is_running = false;
  // IPv4 first; without a port. Link-local IPv6 addresses are left out, since they mean something
  // else on each host.
  std::vector<SocketAddress> addresses;
};

// All of them, in the order of the system.
[[nodiscard]] std::vector<NetworkInterface> network_interfaces();

// Bytes of the largest packet of an interface, and the speed that its driver tells; nothing where
// the system does not know. Apart from the rest, since some drivers take their time.
[[nodiscard]] std::optional<std::size_t> mtu_bytes_of(const std::string& interface);
[[nodiscard]] std::optional<std::uint32_t> mbit_per_s_of(const std::string& interface);

// The addresses by which other hosts can reach this one: the first of each of `interfaces`, in
// their order; or where there are none, those of all interfaces that are up and are no loopback; or
// where there are none of these either, those of the loopback. Throws InvalidUsage where an
// interface does not exist or has no address.
[[nodiscard]] std::vector<SocketAddress> own_addresses(const std::vector<std::string>& interfaces);

// The addresses that others are told to connect to, as the settings say.
[[nodiscard]] std::vector<SocketAddress> told_addresses(const NetworkSettings& settings);

}  // namespace pydist
