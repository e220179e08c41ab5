// Stripe width: how many connections the path that carries traffic should have, and which of them carry nothing for now.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "delegate/wire/wire.h"

namespace adaptra::delegate {

inline constexpr std::uint32_t kMostConnections = 16;  // per path of a channel

// A connection's window is bounded, by buffers and by what its congestion control believes, so one may not fill a long link.
// While more connections bring more, their number is doubled; those that brought nothing are left alone.
//
// BBR keeps no more under way than fits into two of the shortest round trips that it has seen. It forgets the shortest after
// ten seconds. When a link turns long, its connections are stale until then: they hardly move, and their chunks hold up
// messages. New connections know no shorter time, so some are made, and the stale ones are left alone.
class StripeWidth {
 public:
  explicit StripeWidth(Clock::time_point now = {}) noexcept : updated_(now) {}

  // Whether the last update is long enough ago: several round trips.
  [[nodiscard]] bool is_due(Clock::time_point now) const noexcept;

  // Takes the paces of the path's connections, in the order in which they came up. Returns how many there should be, if that is
  // more than before.
  [[nodiscard]] std::optional<std::uint32_t> update(std::span<const Pace> paces, Clock::time_point now);

  // Whether a connection of the path's `count` carries nothing for now: because it is stale, or because more bring nothing.
  [[nodiscard]] bool is_excluded(std::size_t connection, std::size_t count) const noexcept;

 private:
  struct Rates {
    double now = 0, best = 0, when_widened = 0;  // bytes per second
  };

  // Measures the bytes per second; false if the paces say nothing about them.
  [[nodiscard]] bool measure(std::span<const Pace> paces, Clock::duration passed, std::uint64_t& under_way);
  void find_stale(std::span<const Pace> paces, std::uint64_t under_way);
  [[nodiscard]] bool are_limited(std::span<const Pace> paces) const;

  std::uint32_t used_ = 1;           // connections in use, apart from stale ones
  std::uint32_t wanted_ = 1;         // connections in all
  std::uint32_t updates_tried_ = 0;  // since connections were added that have not brought more yet; 0 if there are none
  Clock::time_point updated_;
  Clock::duration round_trip_{};
  std::uint64_t delivered_ = 0;
  Rates rate_;
  std::vector<bool> stale_;
  std::uint32_t stale_count_ = 0;
};

}  // namespace adaptra::delegate
