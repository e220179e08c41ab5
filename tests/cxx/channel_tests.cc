// Tests of when a channel gives its peer up.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <memory>

#include "check.h"
#include "delegate/channel/receive_channel.h"
#include "delegate/system/descriptor.h"
#include "delegate/system/sockets.h"
#include "lone_host.h"

using namespace adaptra::delegate;
using namespace std::chrono_literals;

namespace {

// A channel waits for a message, and its only connection has just ended.
struct CutOff {
  CutOff() {
    int ends[2];
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0, "a connection");
    channel.post(request, 64);
    {
      const Descriptor peer(ends[1]);
      channel.connected(Descriptor(ends[0]), channel.address(), true);
      host.wire(0).progress();
    }
    host.poller.handlers.at(ends[0])->ready(EPOLLIN);
    check(!channel.is_connected(), "the connection to have ended");
  }
  ~CutOff() { channel.reap(); }

  LoneHost host;
  ReceiveChannel channel{host, {.source = 0, .destination = 1}, {"tcp"}};
  std::shared_ptr<Request> request = std::make_shared<Request>();
};

// This rank gets no processor for nine seconds. It knows only what its peer's host said before.
void test_a_rank_that_is_slow_itself_gives_nobody_up() {
  CutOff cut;
  cut.channel.not_connected(cut.channel.address(), error_text(ECONNREFUSED));
  cut.channel.tick(Clock::now() + 9s);
  check(cut.request->outcome() == Outcome::kPending, "the peer to be asked again before it is called gone");
}

void test_a_peer_that_answers_nobody_is_given_up_in_time() {
  CutOff cut;
  cut.channel.not_connected(cut.channel.address(), "nobody answered");
  cut.channel.tick(Clock::now() + 9s);
  check(cut.request->outcome() == Outcome::kPending, "a path to be hoped for");
  cut.channel.tick(Clock::now() + 11s);
  check(cut.request->text() == "no path to rank 0 is left: tcp (nobody answered)", "it to be given up after ten seconds");
}

}  // namespace

void test_channels() {
  test_a_rank_that_is_slow_itself_gives_nobody_up();
  test_a_peer_that_answers_nobody_is_given_up_in_time();
}
