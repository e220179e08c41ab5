// The destination's end of a channel: opens its paths, grants slots, checks what arrives, and hands each message over once.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "delegate/channel/channel.h"
#include "delegate/channel/intervals.h"
#include "delegate/channel/request.h"

namespace adaptra::delegate {

// A slot takes messages of one size only. There are as many slots of each size as the program said that it holds messages at a
// time. So a message that is here early never takes the room of one that is needed now. Slots are made when the first message
// of their size is announced or expected, so a channel that nobody uses costs nothing.
class ReceiveChannel final : public Channel {
 public:
  ReceiveChannel(Host& host, const Address& address, const std::vector<std::string>& paths);

  // Provides at least `count` slots for messages of `bytes` bytes; slots are never taken back.
  void reserve(std::uint64_t bytes, std::size_t count);

  // Expect the next message of this attempt. Receives are matched with messages in order.
  void post(std::shared_ptr<Request> request, std::uint64_t bytes);

  // Receives of the attempt before fail. Its messages that came are dropped.
  void begin() override;

  // Frees this slot: its message is no longer needed.
  void release(std::uint32_t slot);

  [[nodiscard]] std::span<std::byte> place(const Frame& chunk, std::string& refusal) override;
  void chunk(Connection& connection, const Frame& chunk) override;
  void bare_message(Connection& connection, std::uint32_t bytes, std::uint32_t header_checksum) override;
  void writable(Connection&) override {}

 private:
  enum class SlotState { kGranted, kFilling, kHeld };
  struct Slot {
    std::shared_ptr<const Pages> pages;
    SlotState state = SlotState::kGranted;
    std::uint32_t generation = 0;
    std::uint64_t sequence = 0;  // while filling, as the next two
    std::uint64_t attempt = 0;
    std::uint64_t first = 0;
    Intervals covered;  // while filling: bytes whose checksum was right
  };
  struct Class {
    std::size_t reserved = 0;
    std::size_t made = 0;
    bool is_wanted = false;
    std::deque<std::uint32_t> granted;  // slots, in the order in which the source is told and will use them
  };
  // A message's attempt, and its number among those of the attempt.
  using Key = std::pair<std::uint64_t, std::uint64_t>;
  struct Expected {
    std::shared_ptr<Request> request;
    std::uint64_t bytes = 0;
  };
  struct Arrived {
    std::uint32_t slot = 0;
    Clock::time_point at;
  };
  struct Head {
    std::uint64_t sequence = 0;
    Key key;
    std::uint64_t total = 0;
    std::string bytes;
  };
  struct Opening {
    std::uint32_t wanted = 1;
    std::set<std::uint32_t> under_way;  // indices of connections
    Clock::time_point not_before;
    Clock::duration pause{};
  };

  void path_up(std::size_t path, Connection& connection) override;
  void path_failed(std::size_t path) override;
  void opening_failed(const Address& address, const std::string& reason) override;
  [[nodiscard]] std::string handle(Connection& connection, const Frame& frame, std::span<const std::byte> payload) override;
  void every_tick(Clock::time_point now) override;
  [[nodiscard]] bool has_pending() const override { return !expected_.empty(); }
  void fail_pending(const std::string& reason) override;
  [[nodiscard]] bool opens() const override { return true; }

  void want(std::uint64_t bytes);
  void make_slots(std::uint64_t bytes);
  [[nodiscard]] Slot* find(const Frame& chunk, std::string& refusal);
  void grant(std::uint32_t slot);
  [[nodiscard]] bool is_complete(std::uint64_t sequence) const;
  void complete(std::uint32_t slot, Connection& connection);
  void hand_over(const Key& key);
  void drop(std::uint32_t slot);
  void hear(const Frame& frame);
  void compare_with_head();
  void tell(const Frame& frame);
  void give_up_paths(std::uint64_t down);
  void tell_everything(Connection& connection, std::uint32_t asked);
  [[nodiscard]] Frame grant_of(std::uint32_t slot) const;
  [[nodiscard]] Frame ack_of(std::uint64_t sequence) const;

  std::vector<Slot> slots_;
  std::map<std::uint64_t, Class> classes_;  // by message size
  std::map<Key, Expected> expected_;
  std::map<Key, Arrived> arrived_;  // complete, not yet expected
  std::uint64_t next_expected_ = 0;
  std::uint64_t source_attempt_ = 0, source_first_ = 0;  // the source's latest attempt, and its first message
  std::uint64_t complete_below_ = 0;
  std::set<std::uint64_t> complete_above_;
  std::optional<Head> head_;
  std::optional<std::size_t> path_;  // on which the source was last heard to send
  std::vector<Opening> openings_;
};

}  // namespace adaptra::delegate
