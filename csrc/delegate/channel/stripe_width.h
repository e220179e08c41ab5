// How many connections the path that carries traffic should have, and which of them are of no use for now.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "delegate/wire/wire.h"

namespace adaptra::delegate {

inline constexpr std::uint32_t kMostConnections = 16;  // per path of a channel

// A connection's window is bounded, by buffers and by what its congestion control believes, so one may not fill a long link. As
// long as more connections bring more, they are doubled; those that brought nothing are left alone.
//
// BBR keeps no more under way than what it takes for two of the shortest round trips that it has seen, and forgets the shortest
// after ten seconds. When a link turns long, its connections are stale until then: they hardly move, and chunks that they
// were given hold up their messages. New ones know no better time, so they are made, and the stale ones are left alone.
class StripeWidth {
 public:
  explicit StripeWidth(Clock::time_point now = {}) noexcept : updated_(now) {}

  // Whether the last look is long enough ago: several round trips.
  [[nodiscard]] bool is_due(Clock::time_point now) const noexcept;

  // Looks at the path's connections, in the order in which they came up; how many there should be, if that is more than before.
  [[nodiscard]] std::optional<std::uint32_t> update(std::span<const Pace> paces, Clock::time_point now);

  // Whether others of the path's `count` connections should be used instead of this one.
  [[nodiscard]] bool is_excluded(std::size_t connection, std::size_t count) const noexcept;

 private:
  struct Rates {
    double now = 0, best = 0, when_widened = 0;  // bytes per second
  };

  // What the look says of the bytes per second; false if it says nothing.
  [[nodiscard]] bool measure(std::span<const Pace> paces, Clock::duration passed, std::uint64_t& under_way);
  void find_stale(std::span<const Pace> paces, std::uint64_t under_way);
  [[nodiscard]] bool are_limited(std::span<const Pace> paces) const;

  std::uint32_t used_ = 1;           // connections in use, apart from stale ones
  std::uint32_t wanted_ = 1;         // connections in all
  std::uint32_t updates_tried_ = 0;  // since there were more, while they have not brought more; 0 if that is settled
  Clock::time_point updated_;
  Clock::duration round_trip_{};
  std::uint64_t delivered_ = 0;
  Rates rate_;
  std::vector<bool> stale_;
  std::uint32_t stale_count_ = 0;
};

}  // namespace adaptra::delegate
