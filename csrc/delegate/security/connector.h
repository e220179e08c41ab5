// Makes and accepts connections, and admits only peers that have proved to know the job's secret. It listens on the job's
// interfaces only. Strangers cost a bounded number of descriptors for a bounded time.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "delegate/security/handshake.h"
#include "delegate/system/descriptor.h"
#include "delegate/wire/wire.h"

namespace adaptra::delegate {

// A stranger that was rejected: from where, how often, and why the first time.
struct Refusal {
  std::string from;
  std::string reason;
  std::uint64_t count = 0;
};

// One end of a path's sockets.
struct Endpoint {
  std::string host;  // a numeric address
  std::uint16_t port = 0;
};

class Connector {
 public:
  // The user of proven connections. None of these calls may destroy the connector.
  class Owner {
   public:
    virtual ~Owner() = default;
    // Whether this rank has a use for a connection that its peer proved to be `address`, accepted on `path`'s listener.
    [[nodiscard]] virtual bool expects(const Address& address, std::uint32_t path, std::string& refusal) = 0;
    virtual void connected(Descriptor socket, const Address& address, bool opened_here) = 0;
    virtual void not_connected(const Address& address, std::string reason) = 0;
  };

  Connector(Poller& poller, const Credentials& own, Owner& owner, Clock::duration patience);
  ~Connector();
  Connector(const Connector&) = delete;
  Connector& operator=(const Connector&) = delete;

  // Accept connections of `path` on this local address; returns the port. Throws std::system_error, std::invalid_argument.
  std::uint16_t listen(const std::string& host, std::uint32_t path);

  // Open the connection `address` from a local address to the peer's; connected() or not_connected() of the owner follows, not
  // within this call.
  void open(const Address& address, const std::string& local, const Endpoint& remote);

  // Reject handshakes that take too long, and free those that have ended. Not called from within a handler.
  void tick(Clock::time_point now);

  void stop_listening();
  // Ends the handshakes that are under way. Not called from within a handler.
  void give_up();

  [[nodiscard]] std::vector<Refusal> refusals() const;

 private:
  class Listener;
  class PendingHandshake;

  // False if the system had no room for a caller, which then stays in the backlog.
  [[nodiscard]] bool accept(int listener, std::uint32_t path);
  void make_room();
  [[nodiscard]] bool is_own_greeting(const Handshake& handshake) const;
  void admit(PendingHandshake& pending);
  void reject(PendingHandshake& pending, const std::string& reason);
  void note(const std::string& from, const std::string& reason);

  Poller& poller_;
  Credentials own_;
  Owner& owner_;
  Clock::duration patience_;
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::deque<std::unique_ptr<PendingHandshake>> pending_;  // oldest first
  std::deque<std::pair<Address, std::string>> failed_opens_;
  mutable std::mutex refusals_mutex_;
  std::map<std::string, Refusal> refusals_;
};

}  // namespace adaptra::delegate
