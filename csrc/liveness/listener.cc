#include "liveness/listener.h"

#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <map>
#include <system_error>

#include "delegate/security/hmac.h"
#include "delegate/system/sockets.h"

namespace adaptra::liveness {
namespace {

using delegate::Descriptor;

// Strangers may connect and say nothing. Beyond so many one goes for each that comes.
constexpr std::size_t kMostAskers = 64;
constexpr int kBacklog = 1024;
// How long no connection is accepted when the process has no descriptors left.
constexpr int kRestMilliseconds = 100;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

std::uint16_t port_of(int socket) {
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&bound), &length) != 0) fail("getsockname");
  const auto port = bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&bound)->sin6_port
                                                : reinterpret_cast<const sockaddr_in*>(&bound)->sin_port;
  return ntohs(port);
}

}  // namespace

Listener::Listener(const std::string& address, std::span<const std::byte> key) : key_(key.begin(), key.end()) {
  const delegate::SocketAddress local = delegate::resolve(address, 0);
  listening_ = delegate::make_socket(local);
  if (bind(listening_.get(), local.get(), local.length) != 0) fail("bind");
  if (listen(listening_.get(), kBacklog) != 0) fail("listen");
  port_ = port_of(listening_.get());
  wakeup_ = Descriptor(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (wakeup_.get() < 0) fail("eventfd");
  // Signals are for Python's threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread_.native_handle(), "liveness");
}

Listener::~Listener() { close(); }

void Listener::close() {
  if (is_copy() || !thread_.joinable()) return;
  const std::uint64_t one = 1;
  // Only a full counter fails, and then the thread wakes anyway.
  static_cast<void>(write(wakeup_.get(), &one, sizeof one) == 0);
  thread_.join();
  listening_ = Descriptor();
  wakeup_ = Descriptor();
  askers_.clear();
}

void Listener::run() {
  std::vector<pollfd> watched;
  bool accepts = true;
  while (true) {
    watched.assign({{wakeup_.get(), POLLIN, 0}, {accepts ? listening_.get() : -1, POLLIN, 0}});
    for (const Asker& asker : askers_) watched.push_back({asker.socket.get(), POLLIN, 0});
    if (poll(watched.data(), watched.size(), accepts ? -1 : kRestMilliseconds) < 0) continue;
    if (watched[0].revents != 0) return;
    std::size_t at = 2;
    std::erase_if(askers_, [&](Asker& asker) { return watched[at++].revents != 0 && serve(asker); });
    accepts = accept_all();
  }
}

bool Listener::accept_all() {
  while (true) {
    delegate::SocketAddress from;
    from.length = sizeof from.storage;
    const int made =
        accept4(listening_.get(), reinterpret_cast<sockaddr*>(&from.storage), &from.length, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (made < 0) {
      if (errno == ECONNABORTED || errno == EINTR) continue;
      return errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM;
    }
    Asker asker;
    asker.socket = Descriptor(made);
    if (serve(asker)) continue;  // most have sent their question by now
    asker.from = delegate::describe(from);
    if (askers_.size() == kMostAskers) make_room();
    askers_.push_back(std::move(asker));
  }
}

void Listener::make_room() {
  std::map<std::string, std::size_t> counts;
  for (const Asker& asker : askers_) ++counts[asker.from];
  const auto most = std::max_element(counts.begin(), counts.end(),
                                     [](const auto& one, const auto& other) { return one.second < other.second; });
  askers_.erase(std::find_if(askers_.begin(), askers_.end(), [&](const Asker& asker) { return asker.from == most->first; }));
}

bool Listener::serve(Asker& asker) const {
  while (asker.read < kNonceBytes) {
    const ssize_t got = recv(asker.socket.get(), asker.nonce.data() + asker.read, kNonceBytes - asker.read, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (got <= 0) return true;
    asker.read += static_cast<std::size_t>(got);
  }
  const delegate::Digest answer = delegate::hmac_sha256(key_, asker.nonce);
  // So short a text fits a new connection's buffer; whoever has gone needs no answer.
  static_cast<void>(send(asker.socket.get(), answer.data(), answer.size(), MSG_NOSIGNAL));
  return true;
}

}  // namespace adaptra::liveness
