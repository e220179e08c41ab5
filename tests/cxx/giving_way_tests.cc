// Tests of when bulk chunks are let through while other messages are under way.
#include <chrono>

#include "check.h"
#include "delegate/channel/giving_way.h"

using namespace adaptra::delegate;
using namespace std::chrono_literals;

namespace {

const Clock::time_point kStart = Clock::now();

void test_a_free_port_takes_all() {
  GivingWay way;
  for (int k = 0; k < 100; ++k) check(way.may_post(false, k % 2 == 0, kStart), "a free port to take every chunk");
}

void test_a_wanted_port_takes_none_at_first() {
  GivingWay way;
  for (int round = 0; round < 3; ++round) {
    const auto begun = kStart + round * 1s;
    for (auto past = 0ms; past < 5ms; past += 1ms) check(!way.may_post(true, true, begun + past), "the others to go first");
    check(way.may_post(false, true, begun + 5ms), "a gap between them to be used");
  }
}

// Of a port that takes `took` per chunk, whatever that is, bulk chunks get an eighth.
void test_the_share_of_a_wanted_port() {
  for (const auto took : {Clock::duration(500us), Clock::duration(5ms), Clock::duration(20ms)}) {
    GivingWay way;
    int posted = 0;
    Clock::time_point left = kStart;
    const auto end = kStart + 1000 * took;
    for (auto now = kStart; now < end; now += 100us) {
      if (!way.may_post(true, now >= left, now)) continue;
      check(now >= left, "no chunk before the last one has left");
      left = now + took;
      ++posted;
    }
    check(posted >= 110 && posted <= 126, "an eighth of the port");
  }
}

void test_a_stuck_chunk_holds_no_other_for_ever() {
  GivingWay way;
  int posted = 0;
  for (auto now = kStart; now < kStart + 4s; now += 1ms) posted += way.may_post(true, false, now) ? 1 : 0;
  check(posted >= 9 && posted <= 11, "one every four tenths of a second");
}

}  // namespace

void test_giving_way() {
  test_a_free_port_takes_all();
  test_a_wanted_port_takes_none_at_first();
  test_the_share_of_a_wanted_port();
  test_a_stuck_chunk_holds_no_other_for_ever();
}
