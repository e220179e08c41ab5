#include "delegate/channel/stripe_width.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace adaptra::delegate {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Clock::duration kUpdateEvery = std::chrono::milliseconds(100);
// A rate within these factors of the one before counts as the same.
constexpr double kNotMore = 1.1, kNotLess = 0.8;
// Updates until more connections have to bring more: new ones start slowly.
constexpr std::uint32_t kPatience = 10;
// The part of the best rate that is forgotten from one update to the next: a link may carry less than it once did.
constexpr double kForgotten = 0.05;
// The time that busy hosts add to a round trip.
constexpr Clock::duration kCommon = std::chrono::milliseconds(10);
// The part of a round trip for which packets queue on a full link.
constexpr double kQueue = 0.25;

}  // namespace

bool StripeWidth::is_due(Clock::time_point now) const noexcept {
  return now - updated_ >= std::max(kUpdateEvery, 2 * round_trip_);
}

std::optional<std::uint32_t> StripeWidth::update(std::span<const Pace> paces, Clock::time_point now) {
  std::uint64_t under_way = 0;
  if (!measure(paces, now - std::exchange(updated_, now), under_way)) return std::nullopt;
  find_stale(paces, under_way);
  if (paces.size() < wanted_ || !are_limited(paces)) return std::nullopt;
  if (paces.size() - stale_count_ < used_) {
    // Connections in use have become stale, so others are made in their place. The rate of stale ones says nothing about the
    // link.
    rate_.when_widened = 0;
    updates_tried_ = 0;
  } else {
    const bool is_more = rate_.now >= kNotMore * rate_.when_widened, is_less = rate_.now <= kNotLess * rate_.when_widened;
    if (!is_more && updates_tried_ > 0) {
      if (++updates_tried_ > kPatience) {
        used_ /= 2;
        updates_tried_ = 0;
      }
      return std::nullopt;
    }
    if (!is_more && !is_less) return std::nullopt;
    rate_.when_widened = rate_.now;
    updates_tried_ = used_ < kMostConnections ? 1 : 0;
    used_ = std::min(2 * used_, kMostConnections);
  }
  const std::uint32_t before = std::exchange(wanted_, std::max(wanted_, std::min(used_ + stale_count_, kMostConnections)));
  return wanted_ > before ? std::optional(wanted_) : std::nullopt;
}

bool StripeWidth::measure(std::span<const Pace> paces, Clock::duration passed, std::uint64_t& under_way) {
  round_trip_ = {};
  Clock::duration busy{};
  std::uint64_t delivered = 0;
  for (const Pace& pace : paces) {
    delivered += pace.delivered;
    under_way += pace.under_way;
    busy = std::max(busy, pace.busy);
    round_trip_ = std::max(round_trip_, pace.round_trip);
  }
  const std::uint64_t before = std::exchange(delivered_, delivered);
  // An interval with little to send says nothing about the connections.
  if (before == 0 || delivered < before || busy < passed / 2) return false;
  rate_.now = static_cast<double>(delivered - before) / Seconds(busy).count();
  rate_.best = std::max(rate_.now, (1 - kForgotten) * rate_.best);
  return true;
}

void StripeWidth::find_stale(std::span<const Pace> paces, std::uint64_t under_way) {
  // Round trips are longer than believed where this rank's own bytes queue, too.
  const Seconds queued(rate_.best > 0 ? static_cast<double>(under_way) / rate_.best : 0);
  stale_.resize(paces.size());
  for (std::size_t k = 0; k < paces.size(); ++k) {
    const Seconds explained = 2 * paces[k].believed_round_trip + kCommon + (stale_[k] ? Seconds(0) : queued);
    stale_[k] = paces[k].round_trip > explained;
  }
  stale_count_ = static_cast<std::uint32_t>(std::count(stale_.begin(), stale_.end(), true));
}

bool StripeWidth::are_limited(std::span<const Pace> paces) const {
  for (std::size_t k = 0; k < paces.size(); ++k) {
    if (is_excluded(k, paces.size()) || stale_[k]) continue;
    // A link on which bytes queue is full, whatever else holds the connection up.
    const bool is_queueing = paces[k].round_trip > (1 + kQueue) * Seconds(paces[k].believed_round_trip) + kCommon;
    if (!paces[k].is_limited || is_queueing) return false;
  }
  return true;
}

bool StripeWidth::is_excluded(std::size_t connection, std::size_t count) const noexcept {
  const auto is_stale = [this](std::size_t k) { return k < stale_.size() && stale_[k]; };
  // If all are stale, the newest know best.
  if (stale_count_ >= count) return connection + used_ < count;
  std::size_t better = 0;
  for (std::size_t k = 0; k < connection; ++k) better += is_stale(k) ? 0 : 1;
  return is_stale(connection) || better >= used_;
}

}  // namespace adaptra::delegate
