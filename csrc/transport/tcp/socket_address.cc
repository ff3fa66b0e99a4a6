#include "transport/tcp/socket_address.h"

#include <arpa/inet.h>
#include <netdb.h>

#include <array>
#include <cstring>
#include <memory>

#include "base/error.h"

namespace pydist {
namespace {

constexpr const char* kPort = " port ";

}  // namespace

SocketAddress SocketAddress::from_system(const sockaddr* address, socklen_t bytes) {
  PYDIST_CHECK(bytes <= sizeof(sockaddr_storage));
  SocketAddress result;
  std::memcpy(&result.storage_, address, bytes);
  result.bytes_ = bytes;
  // A socket for both families has IPv4 peers, which are known by their own addresses.
  const auto* const six = reinterpret_cast<const sockaddr_in6*>(&result.storage_);
  if (result.family() == AF_INET6 && IN6_IS_ADDR_V4MAPPED(&six->sin6_addr)) {
    sockaddr_in four{};
    four.sin_family = AF_INET;
    four.sin_port = six->sin6_port;
    std::memcpy(&four.sin_addr, &six->sin6_addr.s6_addr[12], sizeof four.sin_addr);
    result.storage_ = {};
    std::memcpy(&result.storage_, &four, sizeof four);
    result.bytes_ = sizeof four;
  }
  return result;
}

SocketAddress SocketAddress::from_host(const std::string& host) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST;  // nobody waits for a name server
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (code != 0) {
    throw InvalidUsage(
        join("'", host, "' is no IPv4 or IPv6 address: ", ::gai_strerror(code), "."));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, &::freeaddrinfo);
  return from_system(found->ai_addr, found->ai_addrlen);
}

SocketAddress SocketAddress::from_text(const std::string& text) {
  const std::size_t place = text.rfind(kPort);
  const std::string port =
      place == std::string::npos ? "" : text.substr(place + std::strlen(kPort));
  const bool is_number = !port.empty() && port.size() <= 5 &&
                         port.find_first_not_of("0123456789") == std::string::npos;
  if (!is_number || std::stoul(port) > UINT16_MAX) {
    throw InvalidUsage(join("'", text, "' is no address with a port."));
  }
  return from_host(text.substr(0, place)).with_port(static_cast<std::uint16_t>(std::stoul(port)));
}

std::string SocketAddress::host() const {
  std::array<char, NI_MAXHOST> text{};
  const int code =
      ::getnameinfo(data(), bytes_, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return code == 0 ? text.data() : "an unknown address";
}

std::uint16_t SocketAddress::port() const noexcept {
  return ntohs(family() == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&storage_)->sin6_port
                                    : reinterpret_cast<const sockaddr_in*>(&storage_)->sin_port);
}

std::string SocketAddress::to_text() const { return join(host(), kPort, port()); }

SocketAddress SocketAddress::with_port(std::uint16_t port) const noexcept {
  SocketAddress result = *this;
  if (family() == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&result.storage_)->sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in*>(&result.storage_)->sin_port = htons(port);
  }
  return result;
}

}  // namespace pydist
