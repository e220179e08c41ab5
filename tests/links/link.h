// A link: what happens to packets between two hosts.
#pragma once

#include <algorithm>
#include <chrono>
#include <deque>
#include <random>
#include <string>
#include <utility>

#include "packet.h"

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// One direction between two hosts. Packets never overtake each other.
class Link {
 public:
  // Takes a packet, which comes out later or never.
  void enter(Packet packet, Clock::time_point now, std::mt19937& random) {
    if (!is_up_ || (loss_ > 0 && std::uniform_real_distribution<>()(random) < loss_)) return;
    if (Seconds(busy_until_ - now).count() > most_queued_ * seconds_per_byte_ && busy_until_ > now) return;
    busy_until_ = std::max(busy_until_, now) + to_clock(static_cast<double>(packet.size - kPrefix) * seconds_per_byte_);
    const auto due = std::max(busy_until_ + delay_, waiting_.empty() ? now : waiting_.back().due);
    waiting_.push_back({due, std::move(packet)});
  }

  [[nodiscard]] Clock::time_point next() const { return waiting_.empty() ? Clock::time_point::max() : waiting_.front().due; }

  [[nodiscard]] Packet leave() {
    Packet packet = std::move(waiting_.front().packet);
    waiting_.pop_front();
    return packet;
  }

  [[nodiscard]] bool change(const std::string& what, double value) {
    if (what == "delay") {
      delay_ = to_clock(value);
    } else if (what == "rate") {
      seconds_per_byte_ = value > 0 ? 1 / value : 0;
    } else if (what == "loss") {
      loss_ = value;
    } else if (what == "queue") {
      most_queued_ = value;
    } else if (what == "up") {
      is_up_ = value != 0;
    } else {
      return false;
    }
    return true;
  }

 private:
  struct Waiting {
    Clock::time_point due;
    Packet packet;
  };

  static Clock::duration to_clock(double seconds) { return std::chrono::duration_cast<Clock::duration>(Seconds(seconds)); }

  Clock::duration delay_{};
  double seconds_per_byte_ = 0, loss_ = 0, most_queued_ = 256e6;
  bool is_up_ = true;
  Clock::time_point busy_until_{};
  std::deque<Waiting> waiting_;
};
