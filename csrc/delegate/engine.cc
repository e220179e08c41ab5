#include "delegate/engine.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <stdexcept>
#include <utility>

#include "delegate/tcp/tcp_wire.h"

namespace adaptra::delegate {
namespace {

// A message of at most this size is sent by the thread that hands it over, if the engine is idle.
constexpr std::size_t kSmallMessage = 64U << 10;
// The time for which wires are polled without a pause after something came.
constexpr Clock::duration kBusyPolling = std::chrono::microseconds(50);
// The time after which a channel that gives way looks again, if nothing happens before.
constexpr int kHeldMs = 1;

}  // namespace

Engine::Engine(std::uint32_t world_size, const Credentials& own, const Timing& timing)
    : rank_(own.rank), world_size_(world_size), timing_(timing), connector_(poller_, own, *this, timing.handshake) {}

Engine::~Engine() {
  close("the engine was destroyed", Clock::duration::zero());
  // Connections are destroyed before the wires and the poller that they use.
  ends_.clear();
}

std::uint16_t Engine::add_tcp_path(const std::string& local) {
  return add_path(std::make_unique<TcpWire>(local, poller_, timing_.silence), local);
}

std::uint16_t Engine::add_path(std::unique_ptr<Wire> wire, const std::string& local) {
  const std::uint16_t port = connector_.listen(local, static_cast<std::uint32_t>(wires_.size()));
  names_.push_back(wire->name());
  locals_.push_back(local);
  wires_.push_back(std::move(wire));
  return port;
}

void Engine::set_peer(std::uint32_t peer, std::vector<Endpoint> endpoints) {
  if (peer >= world_size_ || peer == rank_) {
    throw std::invalid_argument("peer " + std::to_string(peer) + ": expected another rank of 0.." +
                                std::to_string(world_size_ - 1) + ", this is rank " + std::to_string(rank_));
  }
  if (endpoints.size() != wires_.size()) {
    throw std::invalid_argument("peer " + std::to_string(peer) + " has " + std::to_string(endpoints.size()) +
                                " paths: expected as many as rank " + std::to_string(rank_) + " has, " +
                                std::to_string(wires_.size()));
  }
  peers_[peer] = std::move(endpoints);
}

void Engine::start() {
  if (thread_.joinable() || is_closed_) throw std::logic_error("the engine was started before");
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "delegate");
}

std::shared_ptr<const Pages> Engine::allocate(std::size_t bytes) {
  return std::make_shared<const Pages>(next_memory_.fetch_add(1, std::memory_order_relaxed), bytes);
}

void Engine::stock(std::shared_ptr<const Pages> pages) {
  const std::lock_guard lock(stock_mutex_);
  stock_[pages->memory().bytes.size()].push_back(std::move(pages));
}

std::shared_ptr<const Pages> Engine::make_pages(std::size_t bytes) {
  {
    const std::lock_guard lock(stock_mutex_);
    if (const auto found = stock_.find(bytes); found != stock_.end() && !found->second.empty()) {
      std::shared_ptr<const Pages> pages = std::move(found->second.back());
      found->second.pop_back();
      return pages;
    }
  }
  return allocate(bytes);
}

void Engine::check_peer(std::uint32_t peer) const {
  if (!peers_.contains(peer)) throw std::invalid_argument("rank " + std::to_string(peer) + " is no peer: set_peer() it first");
}

void Engine::reserve(std::uint32_t peer, std::uint64_t bytes, std::size_t count) {
  check_peer(peer);
  submit(
      [this, peer, bytes, count] {
        if (is_closed_) return;
        std::size_t& reserved = reserved_[peer][bytes];
        reserved = std::max(reserved, count);
        for (const ChannelClass channel : kChannelClasses) {
          // A rank may never use a channel that gives way, so it is opened with its first message.
          if (gives_way(channel) && ends_[{peer, channel}].receiver == nullptr) continue;
          receiver(peer, channel).reserve(bytes, count);
        }
      },
      true);
}

std::shared_ptr<Request> Engine::send(std::uint32_t peer, ChannelClass channel, std::shared_ptr<const Pages> message,
                                      std::size_t bytes, Clock::time_point posted_at) {
  check_peer(peer);
  if (bytes == 0 || bytes > message->memory().bytes.size()) {
    throw std::invalid_argument("send of " + std::to_string(bytes) + " bytes: expected 1.." +
                                std::to_string(message->memory().bytes.size()) + ", what its memory holds");
  }
  auto request = std::make_shared<Request>(message);
  submit(
      [this, peer, channel, request, message, bytes, posted_at] {
        if (is_closed_) return request->fail("the engine is closed");
        sender(peer, channel).submit(request, message, bytes, posted_at);
      },
      bytes <= kSmallMessage);
  return request;
}

std::shared_ptr<Request> Engine::receive(std::uint32_t peer, ChannelClass channel, std::uint64_t bytes) {
  check_peer(peer);
  auto request = std::make_shared<Request>();
  submit(
      [this, peer, channel, bytes, request] {
        if (is_closed_) return request->fail("the engine is closed");
        receiver(peer, channel).post(request, bytes);
      },
      true);
  return request;
}

void Engine::release(std::uint32_t peer, ChannelClass channel, std::uint32_t slot) {
  submit(
      [this, peer, channel, slot] {
        if (!is_closed_) receiver(peer, channel).release(slot);
      },
      true);
}

void Engine::begin(std::uint64_t attempt) {
  submit(
      [this, attempt] {
        attempt_ = attempt;
        for_each_channel([](Channel& channel, bool) { channel.begin(); });
      },
      true);
}

void Engine::check_own() const {
  if (is_copy()) throw std::logic_error("the engine is another process's: expected no use of it in a forked child");
}

std::vector<Refusal> Engine::refusals() const {
  check_own();
  return connector_.refusals();
}

std::vector<ChannelReport> Engine::channels() const {
  check_own();
  const std::lock_guard lock(mutex_);
  std::vector<ChannelReport> reports;
  for_each_channel([&reports](const Channel& channel, bool is_sender) {
    reports.push_back({channel.address(), is_sender, &channel.stats()});
  });
  return reports;
}

void Engine::submit(std::function<void()> command, bool is_urgent) {
  check_own();
  {
    const std::lock_guard lock(commands_mutex_);
    commands_.push_back(std::move(command));
  }
  if (is_over_) {
    const std::lock_guard lock(mutex_);
    run_commands();
    return;
  }
  if (is_urgent) {
    // Earlier commands run first, so their order is kept whichever thread runs them.
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) {
      run_commands();
      flush();
      // The engine's thread looks when a held channel may go on.
      if (held_.empty()) return;
    }
  }
  poller_.wake();
}

void Engine::run_commands() {
  std::vector<std::function<void()>> commands;
  {
    const std::lock_guard lock(commands_mutex_);
    commands.swap(commands_);
  }
  for (const auto& command : commands) {
    try {
      command();
    } catch (const std::exception& error) {
      fail_all(std::string("the engine failed: ") + error.what());
    }
  }
}

void Engine::flush() {
  while (!to_flush_.empty()) {
    for (Channel* const channel : std::exchange(to_flush_, {})) channel->flush();
  }
}

void Engine::run() {
  auto busy_until = Clock::time_point::min();
  const auto tick_ms =
      std::max<std::int64_t>(1, std::chrono::duration_cast<std::chrono::milliseconds>(timing_.heartbeat).count() / 4);
  int wait_ms = static_cast<int>(tick_ms);
  while (true) {
    const bool is_polling = Clock::now() < busy_until;
    const std::size_t found = poller_.wait(is_polling ? 0 : wait_ms);
    const std::lock_guard lock(mutex_);
    try {
      poller_.dispatch(found);
      if (!run_once(busy_until)) return;
      wait_ms = held_.empty() ? static_cast<int>(tick_ms) : kHeldMs;
    } catch (const std::exception& error) {
      fail_all(std::string("the engine failed: ") + error.what());
    }
  }
}

bool Engine::run_once(Clock::time_point& busy_until) {
  run_commands();
  const auto now = Clock::now();
  bool is_busy = false;
  for (const auto& wire : wires_) is_busy = wire->progress() || is_busy;
  if (is_busy) busy_until = now + kBusyPolling;
  connector_.tick(now);
  if (now >= next_tick_) {
    next_tick_ = now + timing_.heartbeat / 4;
    for_each_channel([now](Channel& channel, bool) { channel.tick(now); });
  }
  for (SendChannel* const channel : std::exchange(held_, {})) channel->resume();
  flush();
  for_each_channel([](Channel& channel, bool) { channel.reap(); });
  if (!closing_until_) return true;
  bool is_connected = false;
  for_each_channel([&is_connected](const Channel& channel, bool) { is_connected = is_connected || channel.is_connected(); });
  return is_connected && now < *closing_until_;
}

void Engine::close(const std::string& reason, Clock::duration linger) {
  if (is_copy()) return;
  {
    const std::lock_guard lock(mutex_);
    run_commands();
    if (!closing_until_) {
      closing_until_ = Clock::now() + linger;
      is_closed_ = true;
      connector_.stop_listening();
      for_each_channel([&reason](Channel& channel, bool) {
        channel.end(reason);
        channel.send_bye();
      });
      flush();
    }
  }
  poller_.wake();
  {
    const std::lock_guard lock(thread_mutex_);
    if (thread_.joinable()) thread_.join();
  }
  is_over_ = true;
  const std::lock_guard lock(mutex_);
  // Commands may have come since the thread ended.
  run_commands();
  fail_all(reason);
  for_each_channel([](Channel& channel, bool) { channel.reap(); });
  connector_.give_up();
  poller_.close();
}

void Engine::fail_all(const std::string& reason) {
  for_each_channel([&reason](Channel& channel, bool) { channel.fail(reason); });
}

void Engine::open(const Address& address) {
  if (is_closed_) return;
  connector_.open(address, locals_[address.path], peers_.at(peer_in(address))[address.path]);
}

bool Engine::may_post(SendChannel& channel) {
  if (!gives_way(channel.address().channel)) return true;
  const bool are_others_under_way = std::any_of(ends_.begin(), ends_.end(), [](const auto& entry) {
    const auto& [key, ends] = entry;
    return !gives_way(key.second) && ends.sender != nullptr && ends.sender->is_under_way();
  });
  const bool has_left = last_bulk_ == nullptr || last_bulk_->has_room();
  if (channel.is_ahead() || !giving_way_.may_post(are_others_under_way, has_left, Clock::now())) {
    if (std::find(held_.begin(), held_.end(), &channel) == held_.end()) held_.push_back(&channel);
    return false;
  }
  last_bulk_ = &channel;
  return true;
}

bool Engine::expects(const Address& address, std::uint32_t path, std::string& refusal) {
  const bool is_own = (address.source == rank_) != (address.destination == rank_);
  if (!is_closed_ && is_own && peer_in(address) < world_size_ && address.path == path && address.index < kMostConnections) {
    return true;
  }
  refusal = "proved the job's secret for a connection that this rank has no use for";
  return false;
}

void Engine::connected(Descriptor socket, const Address& address, bool opened_here) {
  const bool is_source = address.source == rank_, is_question = is_source == opened_here;
  if (!is_question) {
    channel(address).connected(std::move(socket), address, opened_here);
  } else if (is_source) {
    sender(address.destination, address.channel).probe_answered(address);
  } else if (gives_way(address.channel) && peers_.contains(address.source)) {
    (void)receiver(address.source, address.channel);
  }
}

void Engine::not_connected(const Address& address, std::string reason) { channel(address).not_connected(address, reason); }

Channel& Engine::channel(const Address& address) {
  if (address.source == rank_) return sender(address.destination, address.channel);
  return receiver(address.source, address.channel);
}

SendChannel& Engine::sender(std::uint32_t peer, ChannelClass channel) {
  auto& found = ends_[{peer, channel}].sender;
  if (found == nullptr) {
    const Address address{.source = rank_, .destination = peer, .channel = channel};
    found = std::make_unique<SendChannel>(static_cast<Host&>(*this), address, names_);
  }
  return *found;
}

ReceiveChannel& Engine::receiver(std::uint32_t peer, ChannelClass channel) {
  auto& found = ends_[{peer, channel}].receiver;
  if (found == nullptr) {
    const Address address{.source = peer, .destination = rank_, .channel = channel};
    found = std::make_unique<ReceiveChannel>(static_cast<Host&>(*this), address, names_);
    for (const auto& [bytes, count] : reserved_[peer]) found->reserve(bytes, count);
    found->tick(Clock::now());  // opens its paths
  }
  return *found;
}

}  // namespace adaptra::delegate
