// Numeric addresses and non-blocking TCP sockets.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "delegate/system/descriptor.h"

namespace adaptra::delegate {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// Throws std::invalid_argument: `host` is no numeric IPv4 or IPv6 address.
[[nodiscard]] SocketAddress resolve(const std::string& host, std::uint16_t port);

// The host part, for people.
[[nodiscard]] std::string describe(const SocketAddress& address);

// A non-blocking TCP socket of the address's family. Throws std::system_error.
[[nodiscard]] Descriptor make_socket(const SocketAddress& address);

// The system's text for an error number.
[[nodiscard]] std::string error_text(int number);

}  // namespace adaptra::delegate
