// The one concept that all wires share: how the engine makes connections and moves frames over them.
//
// A channel (source rank, destination rank, class) has an ordered list of paths; each path is a Wire and a pair of addresses.
// The destination opens every path of a channel, and the engine's own TCP listener accepts. Both sides prove that they know the
// job's secret. Only then does adopt() hand the socket to the path's Wire, on both sides. The TCP wire goes on
// using that socket. The verbs wire exchanges its queue pairs' addresses over it and keeps it, so that the end of the peer's
// process is noticed at once.
//
// All of this runs on the engine's one thread. Nothing here blocks.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "delegate/wire/frame.h"

namespace adaptra::delegate {

// The reason of a failed connection whose other end was closed, or whose peer's process ended.
inline constexpr std::string_view kPeerEnded = "its peer ended the connection";

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC, as Python's time.monotonic

// Page-aligned host memory that outlives everything that travels through it. Wires register it with their devices on first use,
// under its id, which is never used again.
struct Memory {
  std::uint64_t id = 0;
  std::span<std::byte> bytes;
};

// The classes of channels between two ranks; the values are those of Python's ChannelClass, and stand in the handshake.
enum class ChannelClass : std::uint8_t {
  kForward = 0,
  kBackward = 1,
  kBulk = 2,  // what one worker does for another replica
  kSums = 3,  // what replicas add up
};
inline constexpr std::array kChannelClasses = {ChannelClass::kForward, ChannelClass::kBackward, ChannelClass::kBulk,
                                               ChannelClass::kSums};

// Whether messages of a class give way to those of the others. Its channels are opened when their first message is sent or
// expected.
constexpr bool gives_way(ChannelClass channel) { return channel == ChannelClass::kBulk || channel == ChannelClass::kSums; }

// The identity of a connection; both sides proved it in the handshake.
struct Address {
  std::uint32_t source = 0;       // the rank that sends messages
  std::uint32_t destination = 0;  // the rank that receives them, and opens the connection (see SendChannel::probe_answered)
  ChannelClass channel = ChannelClass::kForward;
  std::uint32_t path = 0;   // index in the ordered list of paths
  std::uint32_t index = 0;  // several connections may share a path
};

// Called by the poller when a descriptor is ready; `events` are epoll's.
class Handler {
 public:
  virtual ~Handler() = default;
  virtual void ready(std::uint32_t events) = 0;
};

// The engine's epoll set. A handler must be removed before it or its descriptor goes away.
class Poller {
 public:
  virtual ~Poller() = default;
  virtual void add(int descriptor, std::uint32_t events, Handler& handler) = 0;
  virtual void modify(int descriptor, std::uint32_t events, Handler& handler) = 0;
  virtual void remove(int descriptor) noexcept = 0;
};

// The pace of a connection, from which StripeWidth decides how many connections a path should have. A wire without windows of
// its own leaves it zero.
struct Pace {
  std::uint64_t delivered = 0;  // bytes that have reached the peer's host, since the beginning
  std::uint64_t under_way = 0;  // bytes sent that have not
  Clock::duration round_trip{};
  Clock::duration believed_round_trip{};  // the one that its congestion control assumes
  Clock::duration busy{};                 // since the last call: time with anything to send
  bool is_limited = false;                // ... and its own window held it up, not the link
};

class Connection;

// The user of a connection: the channel's end on this rank. A connection calls it from progress() or from ready(), never from
// within post(), send() or expose(). After failed() the connection makes no more calls; its user destroys it later, never
// within the call.
class Sink {
 public:
  virtual ~Sink() = default;

  // The connection can be used. Before that nothing may be posted on it.
  virtual void established(Connection& connection) = 0;

  // Returns where the payload of an arriving chunk belongs: `length` bytes. Returns nothing for a late or repeated chunk, whose
  // bytes are dropped. A stream asks before every read, since another connection may complete the slot in between. A chunk that
  // no honest peer sends is refused with a reason, upon which the connection fails.
  [[nodiscard]] virtual std::span<std::byte> place(const Frame& chunk, std::string& refusal) = 0;

  // All bytes of a chunk are in the slot, or were dropped. Its checksum has not been looked at.
  virtual void chunk(Connection& connection, const Frame& chunk) = 0;

  // A whole message of `bytes` bytes came without its header, but with the header's own checksum. It is the next message. It
  // lies in the slot, of those granted for this size, for which the checksum is right.
  virtual void bare_message(Connection& connection, std::uint32_t bytes, std::uint32_t header_checksum) = 0;

  // Any other frame that is not the wire's own; `payload` is valid during the call.
  virtual void control(Connection& connection, const Frame& frame, std::span<const std::byte> payload) = 0;

  // can_post() may have turned true.
  virtual void writable(Connection& connection) = 0;

  virtual void failed(Connection& connection, std::string reason) = 0;
};

// One authenticated connection. Destroying it closes it: its peer sees its end, and its queue pair can no longer be written to.
class Connection {
 public:
  virtual ~Connection() = default;

  // Destination: let the peer write chunks for this slot into `memory`, which stays until withdraw() or the connection's end.
  virtual void expose(std::uint32_t slot, const Memory& memory) = 0;
  virtual void withdraw(std::uint32_t slot) noexcept = 0;

  // Source: whether a chunk for this slot would be taken now. False while the wire's queue is full, or while the peer has not
  // said where the slot lies.
  [[nodiscard]] virtual bool can_post(std::uint32_t slot) const = 0;

  // Source: send `chunk.length` bytes that lie at `chunk.offset` in `message`. They are read later: the message stays untouched
  // until its acknowledgement has come and no connection holds it any more. `may_be_bare`: the destination can tell the header
  // from the checksum that it has, see Sink::bare_message().
  virtual void post(const Frame& chunk, const Memory& message, bool may_be_bare) = 0;

  // Source: whether this connection may still read this message: an acknowledgement that came by another path leaves chunks
  // behind.
  [[nodiscard]] virtual bool holds(const Memory& message) const = 0;

  // Both: a small frame, always taken. `payload` is copied; at most kHeadBytes.
  virtual void send(const Frame& frame, std::span<const std::byte> payload) = 0;

  // Push out what was posted since the last call: lets a wire put several frames into one system call or doorbell.
  virtual void flush() = 0;

  // Stop sending and receiving: the sink is not called again. Its peer may notice only when this is destroyed, soon after.
  virtual void close() noexcept = 0;

  // The last moment at which anything of the peer arrived, or at which a call to this found that something had. The engine
  // fails a connection that is silent for too long.
  [[nodiscard]] virtual Clock::time_point heard() = 0;

  [[nodiscard]] virtual Pace pace() = 0;

  // Source: posted bytes that wait for the port. They have not reached the peer's host, and are more than the link holds on its
  // way. 0 where connections take turns on the port, so that one's bytes wait for no other's.
  [[nodiscard]] virtual std::uint64_t ahead() const { return 0; }
};

// One kind of wire over one local device or interface.
class Wire {
 public:
  virtual ~Wire() = default;

  // A name for people: "tcp 10.0.0.1", "verbs mlx5_0 port 1".
  [[nodiscard]] virtual std::string name() const = 0;

  // The size that chunks should have here, at most kMaxChunkBytes.
  [[nodiscard]] virtual std::uint32_t chunk_bytes() const = 0;

  // Take over the authenticated, non-blocking socket `descriptor` (closed with the connection, also when this throws
  // std::system_error). `opened_here` tells the two sides apart. established() or failed() of `sink` follows.
  [[nodiscard]] virtual std::unique_ptr<Connection> adopt(int descriptor, const Address& address, bool opened_here,
                                                          Sink& sink) = 0;

  // Collect what happened without waiting; true if anything did. Called in a loop while traffic flows, else after a descriptor
  // that the wire gave to the poller was ready.
  virtual bool progress() = 0;

  // This memory is about to go away: drop every registration of it.
  virtual void forget(const Memory& memory) noexcept = 0;
};

}  // namespace adaptra::delegate
