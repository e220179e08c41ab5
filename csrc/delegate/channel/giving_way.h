// When a bulk chunk may be posted: at once while nothing else is under way, else now and then.
#pragma once

#include <algorithm>
#include <chrono>
#include <utility>

#include "delegate/wire/wire.h"

namespace adaptra::delegate {

// Bulk messages, and those of sums, give way to all others of the engine. While one of those is under way, no bulk chunk is
// posted. But on a long link some are under way all the time, though they leave the port idle for most of it. A training step
// whose bulk messages never went would hang. So one chunk at a time is let through. It is followed by a pause of seven times
// the time that it took to leave. Bulk messages thus get an eighth of a port that others could fill, whatever its rate, and
// most of one that is idle. A share counted in bytes of the others would starve them exactly where the port is idle.
class GivingWay {
 public:
  // `are_others_under_way`: whether the port is wanted. `has_left`: whether the bulk chunk posted last has left this process.
  // True means that the caller posts one chunk now.
  [[nodiscard]] bool may_post(bool are_others_under_way, bool has_left, Clock::time_point now) {
    if (!are_others_under_way) {
      is_let_ = was_wanted_ = false;
      return true;
    }
    if (!std::exchange(was_wanted_, true)) not_before_ = now + pause_;
    // One that is stuck holds up its own channel, and no other for ever.
    if (is_let_ && (has_left || now - let_at_ >= kMostPause)) {
      is_let_ = false;
      pause_ = std::clamp<Clock::duration>(kPauses * (now - let_at_), kLeastPause, kMostPause);
      not_before_ = now + pause_;
    }
    if (is_let_ || now < not_before_) return false;
    is_let_ = true;
    let_at_ = now;
    return true;
  }

 private:
  static constexpr int kPauses = 7;
  // Longer than most of the engine's other messages take on a fast port, so that these meet no bulk chunk at all.
  static constexpr Clock::duration kFirstPause = std::chrono::milliseconds(5);
  static constexpr Clock::duration kLeastPause = std::chrono::milliseconds(1);
  static constexpr Clock::duration kMostPause = std::chrono::milliseconds(200);

  bool was_wanted_ = false;
  bool is_let_ = false;  // a chunk was let through at let_at_ and has not left
  Clock::time_point let_at_, not_before_;
  Clock::duration pause_ = kFirstPause;
};

}  // namespace adaptra::delegate
