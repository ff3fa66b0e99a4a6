// Addresses of sockets on the network, IPv4 and IPv6. Values.

#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <string>

namespace pydist {

class SocketAddress {
 public:
  SocketAddress() = default;
  // An address without a port: "10.0.0.1", "fe80::1%eth0". Throws InvalidUsage where it is none.
  [[nodiscard]] static SocketAddress from_host(const std::string& host);
  // As to_text() writes it. Throws InvalidUsage where it is none.
  [[nodiscard]] static SocketAddress from_text(const std::string& text);
  [[nodiscard]] static SocketAddress from_system(const sockaddr* address, socklen_t bytes);

  // "10.0.0.1 port 4711".
  [[nodiscard]] std::string to_text() const;
  [[nodiscard]] std::string host() const;
  [[nodiscard]] std::uint16_t port() const noexcept;
  [[nodiscard]] SocketAddress with_port(std::uint16_t port) const noexcept;

  [[nodiscard]] int family() const noexcept { return storage_.ss_family; }
  [[nodiscard]] const sockaddr* data() const noexcept {
    return reinterpret_cast<const sockaddr*>(&storage_);
  }
  [[nodiscard]] socklen_t bytes() const noexcept { return bytes_; }

 private:
  sockaddr_storage storage_{};
  socklen_t bytes_ = 0;
};

}  // namespace pydist
