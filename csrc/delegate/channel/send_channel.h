// The source's end of a channel: queues messages, keeps each until it is acknowledged, and sends it again when its path fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "delegate/channel/channel.h"
#include "delegate/channel/intervals.h"
#include "delegate/channel/request.h"

namespace adaptra::delegate {

// The destination's slots are the only window: as many messages are in flight as slots are granted. So the rate doesn't fall
// with latency until the receiver's memory is full. The wire decides how many bytes of them are under way at a time. A path
// that can't hold enough bytes is widened by further connections.
class SendChannel final : public Channel {
 public:
  SendChannel(Host& host, const Address& address, const std::vector<std::string>& paths);

  // Queue the first `bytes` of `message`, at least one.
  void submit(std::shared_ptr<Request> request, std::shared_ptr<const Pages> message, std::size_t bytes,
              Clock::time_point posted_at);

  void begin() override;

  // Ends a probe that probe_peer() began: the destination lives.
  void probe_answered(const Address& address);

  // Whether a message is on its way to the destination. One that waits for a slot or a path takes nothing of a port. Were it
  // counted, its destination could wait for a bulk message, and that for it.
  [[nodiscard]] bool is_under_way() const { return path_ && !queue_.empty() && queue_.front().is_begun; }
  // Whether the wire would take more: what was posted before has left.
  [[nodiscard]] bool has_room() const;
  // Whether its next chunk would make others wait for longer than for one message: of a sum, more is posted than has arrived.
  [[nodiscard]] bool is_ahead() const;
  // Goes on after Host::may_post() had said no.
  void resume() { pump(); }

  [[nodiscard]] std::span<std::byte> place(const Frame& chunk, std::string& refusal) override;
  void chunk(Connection&, const Frame&) override {}
  void bare_message(Connection& connection, std::uint32_t bytes, std::uint32_t header_checksum) override;
  void writable(Connection&) override;

 private:
  struct Grant {
    std::uint32_t slot = 0;
    std::uint32_t generation = 0;
  };
  struct Outgoing {
    std::uint64_t sequence = 0;
    std::uint64_t attempt = 0;
    std::uint64_t first = 0;  // of the attempt's messages
    std::shared_ptr<Request> request;
    std::shared_ptr<const Pages> message;
    std::uint64_t total = 0;
    Clock::time_point posted_at;
    Clock::time_point begun_at;
    std::uint64_t cursor = 0;  // bytes posted
    std::optional<Grant> grant;
    std::uint64_t paths = 0;  // bit k: some chunk was posted on path k
    Intervals there;          // bytes that the destination said it has after a path had failed
    std::uint32_t cuts = 0;   // how often a path failed that had carried a part of it
    bool is_unknown = false;  // the destination has not said yet what it has
    bool is_begun = false;
    bool is_sent = false;
  };

  void path_up(std::size_t path, Connection& connection) override;
  void path_failed(std::size_t path) override;
  void opening_failed(const Address& address, const std::string& reason) override;
  [[nodiscard]] std::string handle(Connection& connection, const Frame& frame, std::span<const std::byte> payload) override;
  void every_tick(Clock::time_point now) override;
  [[nodiscard]] bool has_pending() const override { return !queue_.empty(); }
  void fail_pending(const std::string& reason) override;
  [[nodiscard]] bool opens() const override { return false; }

  void probe_peer(Clock::time_point now);
  void choose_path(Clock::time_point now);
  void resync();
  void retire(Clock::time_point now);
  void pump();
  [[nodiscard]] bool take_grant(Outgoing& message);
  void announce(const Outgoing& message);
  void post(Outgoing& message, Connection& connection);
  [[nodiscard]] bool is_next_to_complete(const Outgoing& message, std::uint64_t length) const;
  [[nodiscard]] Connection* pick(std::uint32_t slot);
  void granted(const Frame& frame);
  [[nodiscard]] std::string had(const Frame& frame);
  void resynced();
  void acknowledged(std::uint64_t sequence, std::uint64_t below);
  void finish(Outgoing& message);
  void update_width(Clock::time_point now);

  std::deque<Outgoing> queue_;  // by sequence number; acknowledged ones are gone
  std::size_t next_ = 0;        // index of the first that is not posted in full
  std::uint64_t sequence_ = 0;
  std::uint64_t first_ = 0;  // number of the first message of this attempt
  std::optional<std::size_t> path_, last_path_;
  std::size_t next_connection_ = 0;  // which of the path's connections is next
  std::uint32_t last_slot_ = 0;      // of the chunk posted last
  std::optional<std::uint64_t> announced_;
  std::uint32_t resyncs_ = 0;                        // number of the latest; an answer to an earlier one may be untrue by now
  std::map<std::uint64_t, std::deque<Grant>> free_;  // by the message size that a slot is for
  std::unordered_map<std::uint32_t, std::uint32_t> generations_;  // the latest of each slot
  std::vector<Outgoing> lingering_;                               // acknowledged, but a connection may still read them
  StripeWidth width_;
  std::uint64_t probing_ = 0;  // bit k: on path k it is not known yet whether the destination answers
  Clock::time_point probe_not_before_;
};

}  // namespace adaptra::delegate
