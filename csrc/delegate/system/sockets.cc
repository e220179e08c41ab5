#include "delegate/system/sockets.h"

#include <netdb.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <system_error>

namespace adaptra::delegate {

SocketAddress resolve(const std::string& host, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int status = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); status != 0) {
    throw std::invalid_argument("address '" + host + "': expected a numeric IPv4 or IPv6 address: " + gai_strerror(status));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(found, &freeaddrinfo);
  SocketAddress address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.length = found->ai_addrlen;
  return address;
}

std::string describe(const SocketAddress& address) {
  std::array<char, NI_MAXHOST> host{};
  if (getnameinfo(address.get(), address.length, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST) != 0) return "unknown";
  return host.data();
}

Descriptor make_socket(const SocketAddress& address) {
  Descriptor made(socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (made.get() < 0) throw std::system_error(errno, std::generic_category(), "socket");
  return made;
}

std::string error_text(int number) { return std::generic_category().message(number); }

}  // namespace adaptra::delegate
