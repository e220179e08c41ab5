// The part that both ends of a channel share: keeps its paths alive and tells a dead path from a dead peer.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "delegate/channel/paths.h"
#include "delegate/channel/stats.h"
#include "delegate/channel/stripe_width.h"
#include "delegate/system/descriptor.h"
#include "delegate/wire/memory.h"
#include "delegate/wire/wire.h"

namespace adaptra::delegate {

struct Timing {
  Clock::duration heartbeat = std::chrono::milliseconds(200);
  Clock::duration silence = std::chrono::milliseconds(800);  // without a sign of life a path has failed
  Clock::duration healthy_for = std::chrono::seconds(1);     // before traffic returns to a better path
  Clock::duration lost_after = std::chrono::seconds(10);     // without any path before the channel fails
  Clock::duration handshake = std::chrono::seconds(3);       // for a new connection to prove itself
  Clock::duration retry = std::chrono::milliseconds(50);     // before a failed path is opened again; doubles ...
  Clock::duration retry_at_most = std::chrono::seconds(1);   // ... up to this
};

// The services that a channel needs of its engine.
class Host {
 public:
  virtual ~Host() = default;
  [[nodiscard]] virtual const Timing& timing() const = 0;
  [[nodiscard]] virtual Wire& wire(std::size_t path) = 0;
  [[nodiscard]] virtual std::shared_ptr<const Pages> make_pages(std::size_t bytes) = 0;
  // Open a connection; the channel's connected() or not_connected() follows.
  virtual void open(const Address& address) = 0;
  // Whether a channel may post a chunk now; true means that it does. If not, its resume() is called until it may.
  [[nodiscard]] virtual bool may_post(class SendChannel& channel) = 0;
  // The attempt of the messages that are sent and expected now.
  [[nodiscard]] virtual std::uint64_t attempt() const = 0;
  // Have the channel's flush() called before the engine waits again.
  virtual void wants_flush(class Channel& channel) = 0;
};

class Channel : public Sink {
 public:
  // `address` without path and index; `peer` is the other rank.
  Channel(Host& host, const Address& address, std::uint32_t peer, const std::vector<std::string>& paths);
  ~Channel() override = default;

  // Takes over a proven socket of this channel.
  void connected(Descriptor socket, const Address& address, bool opened_here);
  // Records that a connection could not be opened.
  void not_connected(const Address& address, const std::string& reason);

  void tick(Clock::time_point now);
  void flush();
  void reap() { paths_.reap(); }

  // Begin the host's next attempt. Messages of earlier ones are dropped from now on.
  virtual void begin() = 0;

  // Tell the peer that this rank closes.
  void send_bye();
  // Whether any connection is left.
  [[nodiscard]] bool is_connected() const { return paths_.any_up(); }

  // End the exchange of messages; pending ones fail. end() keeps the connections, for a good-bye.
  void end(const std::string& reason);
  void fail(const std::string& reason);

  [[nodiscard]] const Stats& stats() const { return stats_; }
  [[nodiscard]] const Address& address() const { return address_; }
  [[nodiscard]] std::uint32_t peer() const { return peer_; }

  void established(Connection& connection) final;
  void control(Connection& connection, const Frame& frame, std::span<const std::byte> payload) final;
  void failed(Connection& connection, std::string reason) final;

 protected:
  // Hooks for the two ends. `path` has just come up, or has just failed.
  virtual void path_up(std::size_t path, Connection& connection) = 0;
  virtual void path_failed(std::size_t path) = 0;
  virtual void opening_failed(const Address& address, const std::string& reason) = 0;
  // Handles a frame of the channel's own. Returns nothing, or why no honest peer sends it.
  [[nodiscard]] virtual std::string handle(Connection& connection, const Frame& frame, std::span<const std::byte> payload) = 0;
  virtual void every_tick(Clock::time_point now) = 0;
  [[nodiscard]] virtual bool has_pending() const = 0;
  virtual void fail_pending(const std::string& reason) = 0;
  // Whether it counts against the peer that no path is up, though none ever was.
  [[nodiscard]] virtual bool opens() const = 0;

  // Whether messages wait because no path is up.
  [[nodiscard]] bool is_cut_off() const { return has_pending() && (ever_up_ || opens()) && !paths_.any_up(); }
  void fail_path(std::size_t path, const std::string& reason);
  void send_control(Connection& connection, const Frame& frame, std::span<const std::byte> payload = {});
  void wants_flush();

  Host& host_;
  Address address_;
  std::uint32_t peer_;
  Paths paths_;
  Stats stats_;
  std::string failure_;  // why no message will be exchanged any more

 private:
  void give_up_if_lost(Clock::time_point now);

  bool ever_up_ = false;
  bool is_peer_leaving_ = false;
  bool flush_wanted_ = false;
  Clock::time_point down_since_ = Clock::now();
  Clock::time_point last_heartbeat_;
};

}  // namespace adaptra::delegate
