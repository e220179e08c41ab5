// The engine: one thread that moves all messages of a process, whatever the number of channels.
//
// Programs hand messages over and wait for them from any thread. If the engine is idle and the message is small, the calling
// thread does the work itself, which saves a switch of threads. Otherwise the engine's thread does it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "delegate/channel/channel.h"
#include "delegate/channel/giving_way.h"
#include "delegate/channel/receive_channel.h"
#include "delegate/channel/request.h"
#include "delegate/channel/send_channel.h"
#include "delegate/channel/stats.h"
#include "delegate/security/connector.h"
#include "delegate/system/forks.h"
#include "delegate/wire/poller.h"

namespace adaptra::delegate {

// A channel's counters at one moment, for the rank that asks.
struct ChannelReport {
  Address address;
  bool is_sender = false;
  const Stats* stats = nullptr;  // lives as long as the engine
};

class Engine final : private Host, private Connector::Owner {
 public:
  Engine(std::uint32_t world_size, const Credentials& own, const Timing& timing);
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Adds the next path in the order of preference, before start(): TCP over one local address. Returns the port on which it
  // listens. Throws std::system_error, std::invalid_argument.
  std::uint16_t add_tcp_path(const std::string& local);
  // Adds a path over a wire of another kind. Its connections are made by way of the local address.
  std::uint16_t add_path(std::unique_ptr<Wire> wire, const std::string& local);
  [[nodiscard]] Poller& poller() { return poller_; }

  // Says where a peer listens, one endpoint per path. Before start(); throws std::invalid_argument.
  void set_peer(std::uint32_t peer, std::vector<Endpoint> endpoints);
  void start();

  // Memory for messages to be sent.
  [[nodiscard]] std::shared_ptr<const Pages> allocate(std::size_t bytes);
  // Lets the next slot for messages of this size lie in this memory, such as memory that a device has registered.
  void stock(std::shared_ptr<const Pages> pages);

  // Let a peer send `count` messages of `bytes` bytes, in each class, before any is released.
  void reserve(std::uint32_t peer, std::uint64_t bytes, std::size_t count);
  [[nodiscard]] std::shared_ptr<Request> send(std::uint32_t peer, ChannelClass channel, std::shared_ptr<const Pages> message,
                                              std::size_t bytes, Clock::time_point posted_at);
  [[nodiscard]] std::shared_ptr<Request> receive(std::uint32_t peer, ChannelClass channel, std::uint64_t bytes);
  void release(std::uint32_t peer, ChannelClass channel, std::uint32_t slot);
  // Begin a later attempt: receives under way fail, and messages of earlier attempts are dropped where they arrive.
  void begin(std::uint64_t attempt);

  [[nodiscard]] std::vector<ChannelReport> channels() const;
  [[nodiscard]] std::vector<Refusal> refusals() const;

  // Say good-bye to the peers and end the thread; pending messages fail with `reason`. Waits up to `linger` for the peers to
  // have heard it. May be repeated.
  void close(const std::string& reason, Clock::duration linger);

  // Whether this is a forked child's copy, whose thread and connections are the parent's. A copy can't be used or destroyed.
  [[nodiscard]] bool is_copy() const noexcept { return generation_ != forks::generation(); }

 private:
  using Key = std::pair<std::uint32_t, ChannelClass>;  // peer
  // The ends on this rank of the two channels with a peer in one class; null while not used.
  struct Ends {
    std::unique_ptr<ReceiveChannel> receiver;
    std::unique_ptr<SendChannel> sender;
  };

  [[nodiscard]] const Timing& timing() const override { return timing_; }
  [[nodiscard]] Wire& wire(std::size_t path) override { return *wires_[path]; }
  [[nodiscard]] std::shared_ptr<const Pages> make_pages(std::size_t bytes) override;
  void open(const Address& address) override;
  [[nodiscard]] std::uint64_t attempt() const override { return attempt_; }
  void wants_flush(Channel& channel) override { to_flush_.push_back(&channel); }
  [[nodiscard]] bool may_post(SendChannel& channel) override;
  [[nodiscard]] bool expects(const Address& address, std::uint32_t path, std::string& refusal) override;
  void connected(Descriptor socket, const Address& address, bool opened_here) override;
  void not_connected(const Address& address, std::string reason) override;

  void check_own() const;
  void submit(std::function<void()> command, bool is_urgent);
  void run_commands();
  void flush();
  void run();
  [[nodiscard]] bool run_once(Clock::time_point& busy_until);
  [[nodiscard]] std::uint32_t peer_in(const Address& address) const {
    return address.source == rank_ ? address.destination : address.source;
  }
  [[nodiscard]] Channel& channel(const Address& address);
  [[nodiscard]] SendChannel& sender(std::uint32_t peer, ChannelClass channel);
  [[nodiscard]] ReceiveChannel& receiver(std::uint32_t peer, ChannelClass channel);
  // Calls call(channel, is_sender) for each channel in use.
  template <typename Call>
  void for_each_channel(Call call) const {
    for (const auto& [key, ends] : ends_) {
      if (ends.receiver != nullptr) call(*ends.receiver, false);
      if (ends.sender != nullptr) call(*ends.sender, true);
    }
  }
  void check_peer(std::uint32_t peer) const;
  void fail_all(const std::string& reason);

  const unsigned generation_ = forks::generation();
  const std::uint32_t rank_, world_size_;
  const Timing timing_;
  std::atomic<std::uint64_t> next_memory_{1};

  std::mutex stock_mutex_;
  std::map<std::size_t, std::vector<std::shared_ptr<const Pages>>> stock_;  // by size, for slots to come

  mutable std::mutex mutex_;  // guards all below; held by the thread that moves messages
  EpollPoller poller_;
  std::vector<std::unique_ptr<Wire>> wires_;
  std::vector<std::string> locals_, names_;
  Connector connector_;
  std::map<std::uint32_t, std::vector<Endpoint>> peers_;
  std::map<Key, Ends> ends_;
  std::map<std::uint32_t, std::map<std::uint64_t, std::size_t>> reserved_;  // messages by peer and bytes
  std::vector<Channel*> to_flush_;
  GivingWay giving_way_;
  const SendChannel* last_bulk_ = nullptr;  // which posted the last bulk chunk
  std::vector<SendChannel*> held_;          // which give way
  Clock::time_point next_tick_;
  std::optional<Clock::time_point> closing_until_;
  bool is_closed_ = false;
  std::uint64_t attempt_ = 0;

  std::mutex commands_mutex_;
  std::vector<std::function<void()>> commands_;

  std::mutex thread_mutex_;  // held while the thread is waited for
  std::thread thread_;
  std::atomic<bool> is_over_{false};  // the thread has ended: callers run their commands themselves
};

}  // namespace adaptra::delegate
