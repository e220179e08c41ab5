// The number of connections that a path gets, out of the paces of its connections.
#include <chrono>
#include <vector>

#include "check.h"
#include "delegate/channel/stripe_width.h"

using namespace adaptra::delegate;
using namespace std::chrono_literals;

namespace {

constexpr Clock::duration kStep = 400ms;

// A path whose connections all have the same pace and are busy, updated at equal intervals.
struct Watched {
  Clock::time_point now;
  StripeWidth width{now};
  std::uint64_t delivered = 0;
  Pace each{.delivered = 0,
            .under_way = 1'000'000,
            .round_trip = 60ms,
            .believed_round_trip = 60ms,
            .busy = kStep,
            .is_limited = true};

  // The result of the update after `connections` of them brought `bytes` in all.
  std::optional<std::uint32_t> after(std::uint64_t bytes, std::size_t connections) {
    delivered += bytes;
    std::vector<Pace> paces(connections, each);
    paces.front().delivered = delivered;
    now += kStep;
    check(width.is_due(now), "two round trips to be enough");
    return width.update(paces, now);
  }
};

void test_as_long_as_more_bring_more() {
  Watched watched;
  check(!watched.after(10'000'000, 1), "nothing to be known at the first look");
  check(watched.after(10'000'000, 1) == 2U, "a second connection beside one that its window holds up");
  check(!watched.after(10'000'000, 1), "the second to be waited for");
  check(watched.after(20'000'000, 2) == 4U, "twice as many where two bring more than one");
  check(watched.width.is_excluded(4, 5) && !watched.width.is_excluded(3, 5), "four to be in use");
  for (int look = 0; look < 10; ++look) {
    check(!watched.width.is_excluded(3, 4), "four to be given time");
    check(!watched.after(20'500'000, 4), "no more where four bring no more than two");
  }
  check(watched.width.is_excluded(2, 4) && !watched.width.is_excluded(1, 4), "two to be in use again");
  check(!watched.after(19'500'000, 4), "nothing to change because of noise");
  check(!watched.after(10'000'000, 4) && !watched.width.is_excluded(3, 4), "four to be tried where the link has changed");
  check(watched.after(20'000'000, 4) == 8U, "more where four bring more now");
  check(watched.after(40'000'000, 8) == kMostConnections, "as many as there may be");
  check(!watched.after(80'000'000, kMostConnections), "and no more than that");
  check(!watched.after(160'000'000, kMostConnections), "not even where they bring more");
}

void test_what_says_nothing() {
  Watched watched;
  static_cast<void>(watched.after(10'000'000, 1));
  watched.each.is_limited = false;
  check(!watched.after(10'000'000, 1), "no more beside one that the link holds up");
  watched.each.is_limited = true;
  watched.each.round_trip = 90ms;
  check(!watched.after(10'000'000, 1), "no more on a link that is full");
  watched.each.round_trip = 60ms;
  watched.each.busy = kStep / 4;
  check(!watched.after(10'000'000, 1), "no more for a rank with little to send");
  check(!watched.width.is_due(watched.now + 100ms), "two round trips to be waited for");
  check(StripeWidth(watched.now).is_due(watched.now + 100ms), "a short while to do at the beginning");
}

void test_a_link_that_turns_long() {
  Watched watched;
  watched.each.round_trip = watched.each.believed_round_trip = 1ms;
  watched.each.is_limited = false;
  static_cast<void>(watched.after(40'000'000, 1));
  check(!watched.after(40'000'000, 1), "one connection to do on a short link");
  // A queue of its own bytes: ten times as much under way as the short round trip takes, at the same rate.
  watched.each.under_way = 3'000'000;
  watched.each.round_trip = 32ms;
  check(!watched.after(40'000'000, 1) && !watched.width.is_excluded(0, 2), "a queue to be no reason");
  watched.each.under_way = 100'000;
  watched.each.round_trip = 60ms;
  check(watched.after(2'000'000, 1) == 2U, "another connection beside one that believes the link to be short");
  check(!watched.width.is_excluded(0, 1), "the only connection to be used");
  check(watched.width.is_excluded(0, 2) && !watched.width.is_excluded(1, 2), "the new one to be used instead");
  // The new one keeps much under way, which explains the long round trip for the old one as little as before.
  watched.each.under_way = 3'000'000;
  static_cast<void>(watched.after(40'000'000, 1));
  check(watched.width.is_excluded(0, 2), "the old one to be avoided as long as it believes so");
  static_cast<void>(watched.after(40'000'000, 2));
  check(watched.width.is_excluded(0, 2) && !watched.width.is_excluded(1, 2), "the newest to be used where all believe so");
  watched.each.believed_round_trip = 60ms;
  static_cast<void>(watched.after(40'000'000, 1));
  check(!watched.width.is_excluded(0, 2), "and to be used again when it knows");
}

}  // namespace

void test_stripe_width() {
  test_as_long_as_more_bring_more();
  test_what_says_nothing();
  test_a_link_that_turns_long();
}
