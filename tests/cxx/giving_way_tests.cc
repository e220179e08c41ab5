// Tests of when bulk chunks are let through while other messages are under way, and how far sums get ahead of their port.
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "delegate/channel/giving_way.h"
#include "delegate/channel/send_channel.h"
#include "delegate/system/descriptor.h"
#include "lone_host.h"

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

// Two ends of a TCP connection on this host; the second one takes little before it is read from.
std::array<Descriptor, 2> make_connection() {
  const Descriptor listener(socket(AF_INET, SOCK_STREAM, 0));
  const int little = 64 << 10;
  sockaddr_in name{};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof name;
  auto* const address = reinterpret_cast<sockaddr*>(&name);
  const bool listens = setsockopt(listener.get(), SOL_SOCKET, SO_RCVBUF, &little, sizeof little) == 0 &&
                       bind(listener.get(), address, size) == 0 && listen(listener.get(), 1) == 0 &&
                       getsockname(listener.get(), address, &size) == 0;
  check(listens, "a listener");
  Descriptor one(socket(AF_INET, SOCK_STREAM, 0));
  check(connect(one.get(), address, size) == 0 && fcntl(one.get(), F_SETFL, O_NONBLOCK) == 0, "a connection");
  return {std::move(one), Descriptor(accept(listener.get(), nullptr, nullptr))};
}

class HoldingHost : public LoneHost {
 public:
  [[nodiscard]] bool may_post(SendChannel& channel) override {
    was_held = was_held || channel.is_ahead();
    return !channel.is_ahead();
  }

  bool was_held = false;
};

// Three messages to a peer that has slots for them, and reads nothing at first.
void test_sums_are_no_more_than_a_message_ahead(ChannelClass channel_class) {
  constexpr std::size_t kBytes = 1U << 20, kMessages = 3;
  auto [own, peer] = make_connection();
  const int descriptor = own.get();
  HoldingHost host;
  SendChannel channel(host, {.source = 0, .destination = 1, .channel = channel_class}, {"tcp"});
  channel.connected(std::move(own), channel.address(), false);
  host.wire(0).progress();
  std::vector<std::shared_ptr<Request>> requests;
  for (std::uint32_t k = 0; k < kMessages; ++k) {
    const FrameBytes grant = encode({.kind = FrameKind::kGrant, .slot = k, .generation = 1, .total = kBytes});
    check(send(peer.get(), grant.data(), grant.size(), 0) == static_cast<ssize_t>(grant.size()), "a grant to go");
    auto message = host.make_pages(kBytes);
    requests.push_back(std::make_shared<Request>(message));
    channel.submit(requests.back(), message, kBytes, Clock::now());
  }
  const auto drive = [&] {
    host.poller.handlers.at(descriptor)->ready(EPOLLIN | EPOLLOUT);
    channel.resume();
    channel.flush();
  };
  for (int turn = 0; turn < 50; ++turn) {
    drive();
    std::this_thread::sleep_for(1ms);
  }
  const bool is_sum = channel_class == ChannelClass::kSums;
  check(host.was_held == is_sum && channel.is_ahead() == is_sum, "sums alone to be held");
  int waiting = 0;
  check(ioctl(descriptor, TIOCOUTQ, &waiting) == 0, "what waits to be told");
  check(!is_sum || waiting <= static_cast<int>(kBytes + (512U << 10)), "no more than a message and what the link holds ahead");
  std::vector<std::byte> read(kBytes);
  std::size_t arrived = 0;
  const auto until = Clock::now() + 60s;
  while (arrived < kMessages * kBytes && Clock::now() < until) {
    const ssize_t got = recv(peer.get(), read.data(), read.size(), MSG_DONTWAIT);
    if (got > 0) arrived += static_cast<std::size_t>(got);
    drive();
  }
  check(arrived >= kMessages * kBytes, "all of them to arrive once they are read");
  channel.fail("over");
  channel.reap();
}

}  // namespace

void test_giving_way() {
  test_a_free_port_takes_all();
  test_a_wanted_port_takes_none_at_first();
  test_the_share_of_a_wanted_port();
  test_a_stuck_chunk_holds_no_other_for_ever();
  for (const auto one : {ChannelClass::kSums, ChannelClass::kBulk}) test_sums_are_no_more_than_a_message_ahead(one);
}
