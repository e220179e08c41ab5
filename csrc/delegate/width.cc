#include "delegate/width.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace adaptra::delegate {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Clock::duration kLookEvery = std::chrono::milliseconds(100);
// A rate within these of the one with half the connections is the link's, not theirs; below, the link has changed.
constexpr double kNotMore = 1.1, kNotLess = 0.8;
// Of the best rate, from one look to the next: what a link once carried it may not carry any more.
constexpr double kForgotten = 0.05;
// What busy hosts add to a round trip.
constexpr Clock::duration kCommon = std::chrono::milliseconds(10);

}  // namespace

bool Width::is_due(Clock::time_point now) const noexcept { return now - looked_ >= std::max(kLookEvery, 2 * round_trip_); }

std::optional<std::uint32_t> Width::look(std::span<const Pace> paces, Clock::time_point now) {
  const Clock::duration passed = now - std::exchange(looked_, now);
  round_trip_ = {};
  Clock::duration busy{};
  std::uint64_t delivered = 0, under_way = 0;
  for (const Pace& pace : paces) {
    delivered += pace.delivered;
    under_way += pace.under_way;
    busy = std::max(busy, pace.busy);
    round_trip_ = std::max(round_trip_, pace.round_trip);
  }
  const std::uint64_t before = std::exchange(delivered_, delivered);
  // A time with nothing to send says nothing about the connections.
  if (before == 0 || delivered < before || busy < passed / 2) return std::nullopt;
  const double rate = static_cast<double>(delivered - before) / Seconds(busy).count();
  best_rate_ = std::max(rate, (1 - kForgotten) * best_rate_);
  // Round trips are longer than believed also where this rank's own bytes queue.
  const Seconds queued(best_rate_ > 0 ? static_cast<double>(under_way) / best_rate_ : 0);
  bool are_limited = true;
  outdated_.resize(paces.size());
  for (std::size_t k = 0; k < paces.size(); ++k) {
    const Seconds explained = 2 * paces[k].believed_round_trip + kCommon + (outdated_[k] ? Seconds(0) : queued);
    outdated_[k] = paces[k].round_trip > explained;
    are_limited = are_limited && (paces[k].is_limited || outdated_[k]);
  }
  outdated_count_ = static_cast<std::size_t>(std::count(outdated_.begin(), outdated_.end(), true));
  if (!are_limited || paces.size() < wanted_ || wanted_ >= kMostConnections) return std::nullopt;
  // What outdated connections carry says nothing about the link.
  const bool is_same = rate < kNotMore * rate_when_widened_ && rate > kNotLess * rate_when_widened_;
  if (is_same && outdated_count_ == 0) return std::nullopt;
  rate_when_widened_ = rate;
  wanted_ = std::min(2 * wanted_, kMostConnections);
  return wanted_;
}

bool Width::is_avoided(std::size_t connection, std::size_t count) const noexcept {
  return outdated_count_ < count && connection < outdated_.size() && outdated_[connection];
}

}  // namespace adaptra::delegate
