#include "delegate/security/connector.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "delegate/system/sockets.h"

namespace adaptra::delegate {
namespace {

constexpr std::size_t kMostPending = 64;
constexpr std::size_t kMostRefusals = 256;
constexpr int kBacklog = 128;
// Pause before callers are accepted again for whom there was no descriptor.
constexpr Clock::duration kPause = std::chrono::milliseconds(100);

}  // namespace

class Connector::Listener : public Handler {
 public:
  Listener(Connector& connector, Descriptor socket, std::uint32_t path)
      : connector_(connector), socket_(std::move(socket)), path_(path) {
    connector_.poller_.add(socket_.get(), EPOLLIN, *this);
  }
  ~Listener() override { connector_.poller_.remove(socket_.get()); }

  void ready(std::uint32_t) override {
    if (connector_.accept(socket_.get(), path_)) return;
    // The caller stays in the backlog, and epoll would report it without end.
    connector_.poller_.modify(socket_.get(), 0, *this);
    rests_until_ = Clock::now() + kPause;
  }

  void tick(Clock::time_point now) {
    if (!rests_until_ || now < *rests_until_) return;
    rests_until_.reset();
    connector_.poller_.modify(socket_.get(), EPOLLIN, *this);
  }

 private:
  std::optional<Clock::time_point> rests_until_;
  Connector& connector_;
  Descriptor socket_;
  std::uint32_t path_;
};

// A connection whose handshake is under way.
class Connector::PendingHandshake : public Handler {
 public:
  PendingHandshake(Connector& connector, Descriptor taken, Handshake begun, bool opened, std::uint32_t on_path,
                   std::string peer)
      : opened_here(opened),
        path(on_path),
        from(std::move(peer)),
        handshake(std::move(begun)),
        deadline(Clock::now() + connector.patience_),
        connector_(connector),
        socket_(std::move(taken)) {
    connector_.poller_.add(socket_.get(), opened ? EPOLLOUT : EPOLLIN, *this);
  }
  ~PendingHandshake() override {
    if (!ended) connector_.poller_.remove(socket_.get());
  }

  void ready(std::uint32_t) override {
    if (is_connecting()) {
      int error = 0;
      socklen_t size = sizeof error;
      getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
      if (error != 0) return connector_.reject(*this, error_text(error));
      connected_ = true;
    }
    if (advance()) connector_.poller_.modify(socket_.get(), written_ < output_.size() ? EPOLLIN | EPOLLOUT : EPOLLIN, *this);
  }

  [[nodiscard]] Descriptor release() {
    end();
    return std::move(socket_);
  }
  void end() {
    connector_.poller_.remove(socket_.get());
    ended = true;
  }

  const bool opened_here;
  const std::uint32_t path;
  const std::string from;
  Handshake handshake;
  const Clock::time_point deadline;
  bool ended = false;

 private:
  [[nodiscard]] bool is_connecting() const { return opened_here && !connected_; }

  // Moves the handshake on as far as bytes allow. False if it came to an end.
  bool advance() {
    while (true) {
      if (!write()) return false;
      if (state_ == Handshake::State::kDone && written_ == output_.size()) {
        connector_.admit(*this);
        return false;
      }
      if (state_ == Handshake::State::kDone) return true;  // the socket buffer is full: the rest goes with EPOLLOUT
      const std::size_t wanted = handshake.wanted() - received_;
      // Reads no byte beyond the handshake: those belong to the connection's wire.
      const ssize_t got = recv(socket_.get(), part_.data() + received_, wanted, 0);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
      if (got < 0) return reject(error_text(errno));
      if (got == 0) return reject("ended the connection before it proved anything");
      received_ += static_cast<std::size_t>(got);
      if (received_ < handshake.wanted()) continue;
      state_ = handshake.receive(std::span(part_).first(std::exchange(received_, 0)));
      if (state_ == Handshake::State::kRefused) return reject(handshake.reason());
      if (!opened_here && connector_.is_own_greeting(handshake)) return reject("sent this rank's own nonce back");
    }
  }

  bool write() {
    const auto more = handshake.output();
    output_.insert(output_.end(), more.begin(), more.end());
    while (written_ < output_.size()) {
      const ssize_t put = ::send(socket_.get(), output_.data() + written_, output_.size() - written_, MSG_NOSIGNAL);
      if (put < 0 && (errno == EAGAIN || errno == EINTR)) return true;
      if (put < 0) return reject(error_text(errno));
      written_ += static_cast<std::size_t>(put);
    }
    return true;
  }

  bool reject(const std::string& reason) {
    connector_.reject(*this, reason);
    return false;
  }

  Connector& connector_;
  Descriptor socket_;
  bool connected_ = false;
  Handshake::State state_ = Handshake::State::kTalking;
  std::array<std::byte, 64> part_{};
  std::size_t received_ = 0;
  std::vector<std::byte> output_;
  std::size_t written_ = 0;
};

Connector::Connector(Poller& poller, const Credentials& own, Owner& owner, Clock::duration patience)
    : poller_(poller), own_(own), owner_(owner), patience_(patience) {}

Connector::~Connector() = default;

std::uint16_t Connector::listen(const std::string& host, std::uint32_t path) {
  const SocketAddress local = resolve(host, 0);
  Descriptor socket = make_socket(local);
  if (bind(socket.get(), local.get(), local.length) != 0) {
    throw std::system_error(errno, std::generic_category(), "bind to " + host);
  }
  if (::listen(socket.get(), kBacklog) != 0) throw std::system_error(errno, std::generic_category(), "listen on " + host);
  SocketAddress bound;
  bound.length = sizeof bound.storage;
  if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&bound.storage), &bound.length) != 0) {
    throw std::system_error(errno, std::generic_category(), "getsockname of " + host);
  }
  listeners_.push_back(std::make_unique<Listener>(*this, std::move(socket), path));
  // The port is at the same place in both families' addresses, in network order.
  const auto* const bytes = reinterpret_cast<const unsigned char*>(&bound.storage);
  return static_cast<std::uint16_t>(bytes[2] << 8 | bytes[3]);
}

void Connector::open(const Address& address, const std::string& local, const Endpoint& remote) {
  try {
    const SocketAddress from = resolve(local, 0), to = resolve(remote.host, remote.port);
    Descriptor socket = make_socket(to);
    if (bind(socket.get(), from.get(), from.length) != 0) {
      throw std::system_error(errno, std::generic_category(), "bind to " + local);
    }
    if (connect(socket.get(), to.get(), to.length) != 0 && errno != EINPROGRESS) {
      throw std::system_error(errno, std::generic_category(), "connect to " + remote.host);
    }
    pending_.push_back(std::make_unique<PendingHandshake>(
        *this, std::move(socket), Handshake::open(own_, address, make_nonce()), true, address.path, remote.host));
  } catch (const std::exception& error) {
    failed_opens_.emplace_back(address, error.what());
  }
}

bool Connector::accept(int listener, std::uint32_t path) {
  while (true) {
    SocketAddress from;
    from.length = sizeof from.storage;
    Descriptor socket(
        accept4(listener, reinterpret_cast<sockaddr*>(&from.storage), &from.length, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.get() < 0) {
      const int error = errno;
      if (error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM) {
        note("callers", error_text(error) + ": expected a higher limit of open files (ulimit -n)");
        return false;
      }
      return true;  // no caller is left, or it has gone again
    }
    make_room();
    pending_.push_back(std::make_unique<PendingHandshake>(*this, std::move(socket), Handshake::accept(own_, make_nonce()),
                                                          false, path, describe(from)));
  }
}

// Rejects the oldest caller from the address that has most of them. So a host that floods this rank loses only its own places.
void Connector::make_room() {
  std::map<std::string, std::size_t> places;
  std::size_t taken = 0;
  for (const auto& pending : pending_) {
    if (pending->opened_here || pending->ended) continue;
    ++places[pending->from];
    ++taken;
  }
  if (taken < kMostPending) return;
  const auto most = std::max_element(places.begin(), places.end(),
                                     [](const auto& one, const auto& other) { return one.second < other.second; });
  // An honest peer is done within a few round trips, so the oldest is the least likely to be one.
  const auto oldest = std::find_if(pending_.begin(), pending_.end(), [&most](const auto& pending) {
    return !pending->opened_here && !pending->ended && pending->from == most->first;
  });
  reject(**oldest, "had proved nothing when others came");
}

bool Connector::is_own_greeting(const Handshake& handshake) const {
  const auto nonce = handshake.nonce();
  return std::any_of(pending_.begin(), pending_.end(), [&nonce](const auto& pending) {
    return pending->opened_here && std::equal(nonce.begin(), nonce.end(), pending->handshake.nonce().begin());
  });
}

void Connector::admit(PendingHandshake& pending) {
  const Address address = pending.handshake.address();
  std::string refusal;
  if (!pending.opened_here && !owner_.expects(address, pending.path, refusal)) return reject(pending, refusal);
  owner_.connected(pending.release(), address, pending.opened_here);
}

void Connector::reject(PendingHandshake& pending, const std::string& reason) {
  pending.end();
  if (pending.opened_here) {
    owner_.not_connected(pending.handshake.address(), reason);
  } else {
    note(pending.from, reason);
  }
}

void Connector::note(const std::string& from, const std::string& reason) {
  const std::lock_guard lock(refusals_mutex_);
  const auto found = refusals_.find(from);
  if (found != refusals_.end()) {
    ++found->second.count;
  } else if (refusals_.size() < kMostRefusals) {
    refusals_[from] = Refusal{from, reason, 1};
  }
}

void Connector::tick(Clock::time_point now) {
  for (const auto& listener : listeners_) listener->tick(now);
  for (std::size_t k = 0; k < pending_.size(); ++k) {
    PendingHandshake& pending = *pending_[k];
    if (pending.ended || pending.deadline >= now) continue;
    const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(patience_).count();
    reject(pending, pending.opened_here ? "nobody answered within " + std::to_string(limit) + " ms"
                                        : "took too long to prove that it knows this job's secret");
  }
  std::erase_if(pending_, [](const auto& pending) { return pending->ended; });
  while (!failed_opens_.empty()) {
    const auto [address, reason] = std::move(failed_opens_.front());
    failed_opens_.pop_front();
    owner_.not_connected(address, reason);
  }
}

void Connector::stop_listening() { listeners_.clear(); }

void Connector::give_up() { pending_.clear(); }

std::vector<Refusal> Connector::refusals() const {
  const std::lock_guard lock(refusals_mutex_);
  std::vector<Refusal> listed;
  for (const auto& [from, refusal] : refusals_) listed.push_back(refusal);
  return listed;
}

}  // namespace adaptra::delegate
