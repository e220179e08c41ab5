// The services that a channel needs of an engine, without one: nothing is opened, and the test moves the bytes.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "delegate/channel/channel.h"
#include "delegate/tcp/tcp_wire.h"

class NoPoller : public adaptra::delegate::Poller {
 public:
  void add(int descriptor, std::uint32_t, adaptra::delegate::Handler& handler) override { handlers[descriptor] = &handler; }
  void modify(int, std::uint32_t, adaptra::delegate::Handler&) override {}
  void remove(int descriptor) noexcept override { handlers.erase(descriptor); }

  std::map<int, adaptra::delegate::Handler*> handlers;
};

class LoneHost : public adaptra::delegate::Host {
 public:
  explicit LoneHost(adaptra::delegate::Timing timing = {}) : timing_(std::move(timing)) {}

  [[nodiscard]] const adaptra::delegate::Timing& timing() const override { return timing_; }
  [[nodiscard]] adaptra::delegate::Wire& wire(std::size_t) override { return wire_; }
  [[nodiscard]] std::shared_ptr<const adaptra::delegate::Pages> make_pages(std::size_t bytes) override {
    return std::make_shared<const adaptra::delegate::Pages>(++memories_, bytes);
  }
  void open(const adaptra::delegate::Address&) override {}
  [[nodiscard]] bool may_post(adaptra::delegate::SendChannel&) override { return true; }
  [[nodiscard]] std::uint64_t attempt() const override { return attempt_of_calls; }
  void wants_flush(adaptra::delegate::Channel& channel) override { to_flush = &channel; }

  NoPoller poller;
  adaptra::delegate::Channel* to_flush = nullptr;
  std::uint64_t attempt_of_calls = 0;

 private:
  adaptra::delegate::Timing timing_;
  adaptra::delegate::TcpWire wire_{"127.0.0.1", poller, std::chrono::seconds(1)};
  std::uint64_t memories_ = 0;
};
