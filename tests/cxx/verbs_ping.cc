// Two processes pass a chunk to and fro over one connection of the verbs wire, without an engine: this measures the wire alone.
//   verbs_ping DEVICE LOCAL PORT BYTES ROUNDS           waits for its peer.
//   verbs_ping DEVICE LOCAL PORT BYTES ROUNDS REMOTE    connects, and prints the seconds of half of each round, one a line.
#include <fcntl.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "delegate/system/crc32c.h"
#include "delegate/system/sockets.h"
#include "delegate/verbs/verbs.h"
#include "delegate/wire/memory.h"
#include "delegate/wire/poller.h"

using namespace adaptra::delegate;

namespace {

// The completion queue is found empty this often before the processor is left to others.
constexpr int kPatience = 1000;

void must(bool is_so, const char* what) {
  if (!is_so) throw std::runtime_error(what);
}

Descriptor meet(const std::string& local, std::uint16_t port, const char* remote) {
  const SocketAddress here = resolve(local, remote == nullptr ? port : std::uint16_t{0});
  Descriptor socket = make_socket(here);
  fcntl(socket.get(), F_SETFL, 0);
  const int on = 1;
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  must(bind(socket.get(), here.get(), here.length) == 0, "bind");
  if (remote == nullptr) {
    must(listen(socket.get(), 1) == 0, "listen");
    return Descriptor(accept(socket.get(), nullptr, nullptr));
  }
  const SocketAddress there = resolve(remote, port);
  for (int tries = 0; connect(socket.get(), there.get(), there.length) != 0; ++tries) {
    must(tries < 500, "the peer does not listen");
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return socket;
}

class Pinger : public Sink {
 public:
  explicit Pinger(std::size_t bytes) : slot_(1, bytes), message_(2, bytes) {}

  void established(Connection& connection) override {
    connection_ = &connection;
    connection.expose(0, slot_.memory());
    connection.flush();
  }
  std::span<std::byte> place(const Frame& chunk, std::string&) override { return slot_.memory().bytes.first(chunk.length); }
  void chunk(Connection&, const Frame&) override { ++arrived; }
  void bare_message(Connection&, std::uint32_t, std::uint32_t checksum) override {
    must(checksum == header_checksum(encode(header_of(slot_))), "a message is corrupted");
    ++arrived;
  }
  void control(Connection&, const Frame&, std::span<const std::byte>) override {}
  void writable(Connection&) override {}
  void failed(Connection&, std::string reason) override { throw std::runtime_error(reason); }

  [[nodiscard]] bool can_send() const { return connection_ != nullptr && connection_->can_post(0); }
  void send() {
    connection_->post(header_of(message_), message_.memory(), true);
    connection_->flush();
  }

  int arrived = 0;

 private:
  [[nodiscard]] static Frame header_of(const Pages& pages) {
    const auto length = static_cast<std::uint32_t>(pages.memory().bytes.size());
    return {.kind = FrameKind::kChunk, .total = length, .length = length, .checksum = crc32c(pages.memory().bytes)};
  }

  Pages slot_, message_;
  Connection* connection_ = nullptr;
};

// A count that goes on evenly. Reading the clock is a system call in the lab's kernel, and takes as long as a third of a
// message.
std::uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  return static_cast<std::uint64_t>(Clock::now().time_since_epoch().count());
#endif
}

void run(int count, char** given) {
  const char* const remote = count > 6 ? given[6] : nullptr;
  const int rounds = std::atoi(given[5]);
  EpollPoller poller;
  const auto wire = make_verbs_wire(given[1], 1, poller);
  Pinger pinger(std::strtoull(given[4], nullptr, 10));
  Descriptor socket = meet(given[2], static_cast<std::uint16_t>(std::atoi(given[3])), remote);
  const auto connection = wire->adopt(socket.release(), {}, remote != nullptr, pinger);
  while (!pinger.can_send()) poller.dispatch(poller.wait(10)), wire->progress();
  std::vector<std::uint64_t> moments = {ticks()};
  const auto began = Clock::now();
  for (int round = 1; round <= rounds; ++round) {
    if (remote != nullptr) pinger.send();
    for (int idle = 0; pinger.arrived < round;) {
      // Both processes and the device may share one processor.
      if (!wire->progress() && ++idle % kPatience == 0) std::this_thread::yield();
    }
    if (remote == nullptr) pinger.send();
    moments.push_back(ticks());
  }
  const std::chrono::duration<double> took = Clock::now() - began;
  const double tick = took.count() / static_cast<double>(moments.back() - moments.front());
  // The last chunk must leave before its queue pair goes.
  for (const auto until = Clock::now() + std::chrono::milliseconds(200); remote == nullptr && Clock::now() < until;) {
    wire->progress();
  }
  for (std::size_t k = 1; remote != nullptr && k < moments.size(); ++k) {
    std::printf("%.9f\n", static_cast<double>(moments[k] - moments[k - 1]) * tick / 2);
  }
}

}  // namespace

int main(int count, char** given) {
  if (count < 6) return std::fputs("usage: verbs_ping DEVICE LOCAL PORT BYTES ROUNDS [REMOTE]\n", stderr), 2;
  try {
    run(count, given);
  } catch (const std::exception& error) {
    return std::fprintf(stderr, "verbs_ping: %s\n", error.what()), 1;
  }
}
