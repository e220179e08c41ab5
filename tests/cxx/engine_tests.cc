// Two engines on two loopback addresses, used from several threads at a time, for the thread sanitizer.
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "delegate/engine.h"
#include "delegate/system/descriptor.h"
#include "delegate/system/sockets.h"

using namespace adaptra::delegate;

namespace {

constexpr std::chrono::duration<double> kPatience{60};

struct Two {
  Two() {
    Timing timing;
    // A sanitizer on a busy machine makes a thread slow, not dead.
    timing.silence = std::chrono::seconds(20);
    for (std::uint32_t rank : {0U, 1U}) engines.push_back(std::make_unique<Engine>(2, Credentials{.rank = rank}, timing));
    std::vector<std::vector<Endpoint>> endpoints(2);
    for (std::size_t rank : {0U, 1U}) {
      for (const char* host : {"127.0.0.2", "127.0.0.3"}) endpoints[rank].push_back({host, engines[rank]->add_tcp_path(host)});
    }
    port = endpoints[0][0].port;
    engines[0]->set_peer(1, endpoints[1]);
    engines[1]->set_peer(0, endpoints[0]);
    for (const auto& engine : engines) engine->start();
  }

  std::vector<std::unique_ptr<Engine>> engines;
  std::uint16_t port = 0;
};

int value_of(std::size_t number, std::uint32_t source, ChannelClass channel) {
  return static_cast<int>(number + source + 70 * static_cast<std::size_t>(channel));
}

// Messages of several chunks both ways in all classes of channels, a thread for each.
void test_all_channels_at_a_time() {
  constexpr std::size_t kCount = 40, kBytes = 700'001, kWindow = 4;
  Two two;
  std::atomic<bool> is_done{false};
  std::vector<std::thread> threads;
  for (const std::uint32_t source : {0U, 1U}) {
    for (const ChannelClass channel : kChannelClasses) {
      threads.emplace_back([&, source, channel] {
        Engine& engine = *two.engines[source];
        std::vector<std::shared_ptr<Request>> sends;
        for (std::size_t k = 0; k < kCount; ++k) {
          auto message = engine.allocate(kBytes);
          std::memset(message->memory().bytes.data(), value_of(k, source, channel), kBytes);
          sends.push_back(engine.send(1 - source, channel, message, kBytes, Clock::now()));
        }
        for (const auto& send : sends) check(send->wait(kPatience) == Outcome::kDone, "every message to be acknowledged");
      });
      threads.emplace_back([&, source, channel] {
        Engine& engine = *two.engines[1 - source];
        engine.reserve(source, kBytes, kWindow);
        for (std::size_t k = 0; k < kCount; ++k) {
          const auto request = engine.receive(source, channel, kBytes);
          check(request->wait(kPatience) == Outcome::kDone, "every message to arrive");
          const auto expected = static_cast<std::byte>(value_of(k, source, channel));
          for (const std::byte byte : request->pages()->memory().bytes) check(byte == expected, "its own bytes");
          engine.release(source, channel, request->slot());
        }
      });
    }
  }
  threads.emplace_back([&] {
    while (!is_done) {
      for (const auto& engine : two.engines) {
        for (const auto& report : engine->channels()) {
          check(report.stats->acknowledged.load() <= kCount, "no message to be counted twice");
        }
        check(engine->refusals().empty(), "nobody to be refused");
      }
    }
  });
  for (std::size_t k = 0; k + 1 < threads.size(); ++k) threads[k].join();
  is_done = true;
  threads.back().join();
}

std::ptrdiff_t open_files() { return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}); }

// A close from one thread while others wait and submit. The engine is there longer than its files.
void test_close_ends_every_wait() {
  const std::ptrdiff_t files = open_files();
  Two two;
  std::vector<std::thread> threads;
  std::vector<std::shared_ptr<Request>> waits;
  two.engines[1]->reserve(0, 1000, 2);
  for (int k = 0; k < 4; ++k) waits.push_back(two.engines[1]->receive(0, ChannelClass::kForward, 1000));
  for (const auto& wait : waits) {
    threads.emplace_back([&wait] { check(wait->wait(kPatience) == Outcome::kFailed, "the close to end the wait"); });
  }
  two.engines[1]->close("the reason", std::chrono::milliseconds(200));
  for (auto& thread : threads) thread.join();
  for (const auto& wait : waits) check(wait->text() == "the reason", "the reason to be told");
  check(two.engines[1]->receive(0, ChannelClass::kForward, 1000)->wait(kPatience) == Outcome::kFailed,
        "a closed engine to refuse");
  two.engines[1]->close("again", std::chrono::milliseconds(0));
  two.engines[0]->close("the reason", std::chrono::milliseconds(0));
  check(open_files() == files, "no open file of a closed engine");
}

// Strangers come and go while messages travel.
void test_strangers() {
  Two two;
  two.engines[1]->reserve(0, 1000, 1);
  for (int k = 0; k < 50; ++k) {
    const SocketAddress to = resolve("127.0.0.2", two.port);
    Descriptor caller(socket(AF_INET, SOCK_STREAM, 0));
    check(connect(caller.get(), to.get(), to.length) == 0, "the listener to be there");
    if (k % 2 == 0) check(send(caller.get(), "GET / HTTP/1.1", 14, MSG_NOSIGNAL) == 14, "the stranger to be heard");
    const auto receive = two.engines[1]->receive(0, ChannelClass::kForward, 1000);
    const auto send = two.engines[0]->send(1, ChannelClass::kForward, two.engines[0]->allocate(1000), 1000, Clock::now());
    check(receive->wait(kPatience) == Outcome::kDone, "the job's own message to arrive");
    two.engines[1]->release(0, ChannelClass::kForward, receive->slot());
    check(send->wait(kPatience) == Outcome::kDone, "and to be acknowledged");
  }
}

// Memory that a device has registered takes the next message of its size.
void test_a_slot_lies_in_stocked_memory() {
  Two two;
  const auto pages = two.engines[1]->allocate(1000);
  two.engines[1]->stock(pages);
  two.engines[1]->reserve(0, 1000, 2);
  for (const bool is_first : {true, false}) {
    const auto receive = two.engines[1]->receive(0, ChannelClass::kForward, 1000);
    const auto send = two.engines[0]->send(1, ChannelClass::kForward, two.engines[0]->allocate(1000), 1000, Clock::now());
    check(send->wait(kPatience) == Outcome::kDone && receive->wait(kPatience) == Outcome::kDone, "a message to arrive");
    const bool is_there = receive->pages()->memory().bytes.data() == pages->memory().bytes.data();
    check(is_there == is_first, "the stocked memory to take one message, and new memory the next");
  }
}

bool has_bulk(const Engine& engine) {
  const auto reports = engine.channels();
  return std::any_of(reports.begin(), reports.end(),
                     [](const ChannelReport& report) { return report.address.channel == ChannelClass::kBulk; });
}

// The bulk channel is opened by its first message, received or not, and not before.
void test_bulk_is_opened_by_its_first_message() {
  Two two;
  Engine &source = *two.engines[0], &destination = *two.engines[1];
  destination.reserve(0, 1000, 1);
  const auto first = source.send(1, ChannelClass::kForward, source.allocate(1000), 1000, Clock::now());
  check(first->wait(kPatience) == Outcome::kDone, "a forward message to be acknowledged");
  check(!has_bulk(source) && !has_bulk(destination), "no bulk channel before its first message");
  const auto second = source.send(1, ChannelClass::kBulk, source.allocate(1000), 1000, Clock::now());
  check(second->wait(kPatience) == Outcome::kDone, "a message to travel whether its receive is posted or not");
  const auto receive = destination.receive(0, ChannelClass::kBulk, 1000);
  check(receive->wait(kPatience) == Outcome::kDone, "it to be there");
}

// Returns how many of 128 activations had arrived when a bulk message an eighth of their size had.
std::size_t activations_before_bulk() {
  constexpr std::size_t kCount = 128, kBytes = 512U << 10, kBulkBytes = 16 * kBytes;
  Two two;
  Engine &source = *two.engines[0], &destination = *two.engines[1];
  destination.reserve(0, kBytes, kCount);
  destination.reserve(0, kBulkBytes, 2);
  const auto send_bulk = [&] {
    return source.send(1, ChannelClass::kBulk, source.allocate(kBulkBytes), kBulkBytes, Clock::now());
  };
  check(send_bulk()->wait(kPatience) == Outcome::kDone, "both classes' connections to be there");
  std::vector<std::shared_ptr<Request>> activations;
  for (std::size_t k = 0; k < kCount; ++k) {
    activations.push_back(source.send(1, ChannelClass::kForward, source.allocate(kBytes), kBytes, Clock::now()));
  }
  const auto bulk = send_bulk();
  check(bulk->wait(kPatience) == Outcome::kDone, "the bulk message to arrive");
  std::size_t before = 0;
  for (const auto& activation : activations)
    before += activation->outcome() == Outcome::kDone && activation->moment() < bulk->moment();
  for (const auto& activation : activations) check(activation->wait(kPatience) == Outcome::kDone, "all to arrive");
  return before;
}

// Equal parts of the port would bring the bulk message after about 16 activations, each time. On a busy machine there may be
// moments without an activation under way, in which bulk has the port for itself. So one of five times is enough.
void test_bulk_gives_way() {
  std::size_t most = 0;
  for (int times = 0; times < 5 && most < 48; ++times) most = std::max(most, activations_before_bulk());
  check(most >= 48, "most activations to be there first");
}

bool is_bulk_under_way(const Engine& engine) {
  const auto reports = engine.channels();
  return std::any_of(reports.begin(), reports.end(), [](const ChannelReport& report) {
    return report.address.channel == ChannelClass::kBulk && report.is_sender && report.stats->in_flight.load() > 0;
  });
}

// An activation that is handed over while a large bulk message is under way is there before it. On a busy machine this thread
// may get its turn only when all of the bulk message has left. So one of twenty times is enough: in one queue it never would
// be.
void test_an_activation_overtakes_bulk() {
  constexpr std::size_t kBytes = 512U << 10, kBulkBytes = 64U << 20;
  Two two;
  Engine &source = *two.engines[0], &destination = *two.engines[1];
  destination.reserve(0, kBytes, 1);
  destination.reserve(0, kBulkBytes, 1);
  for (int attempt = 0; attempt < 20; ++attempt) {
    const auto bulk = source.send(1, ChannelClass::kBulk, source.allocate(kBulkBytes), kBulkBytes, Clock::now());
    // Who sleeps gets its turn before who has spun.
    while (!is_bulk_under_way(source) && bulk->outcome() == Outcome::kPending)
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    const auto activation = source.send(1, ChannelClass::kForward, source.allocate(kBytes), kBytes, Clock::now());
    check(activation->wait(kPatience) == Outcome::kDone && bulk->wait(kPatience) == Outcome::kDone, "both to arrive");
    if (activation->moment() < bulk->moment()) return;
    for (const auto& [channel, bytes] :
         {std::pair(ChannelClass::kBulk, kBulkBytes), std::pair(ChannelClass::kForward, kBytes)}) {
      const auto receive = destination.receive(0, channel, bytes);
      check(receive->wait(kPatience) == Outcome::kDone, "the message to be there");
      destination.release(0, channel, receive->slot());
    }
  }
  check(false, "the activation to be there first");
}

}  // namespace

void test_engines() {
  test_an_activation_overtakes_bulk();
  test_a_slot_lies_in_stocked_memory();
  test_bulk_is_opened_by_its_first_message();
  test_bulk_gives_way();
  test_all_channels_at_a_time();
  test_close_ends_every_wait();
  test_strangers();
}
