// The engine's epoll set, with a descriptor that wakes it.
#pragma once

#include <sys/epoll.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "delegate/system/descriptor.h"
#include "delegate/wire/wire.h"

namespace adaptra::delegate {

class EpollPoller final : public Poller {
 public:
  EpollPoller();

  void add(int descriptor, std::uint32_t events, Handler& handler) override;
  void modify(int descriptor, std::uint32_t events, Handler& handler) override;
  void remove(int descriptor) noexcept override;

  // Waits for events. May be called on any thread, without the engine's lock.
  [[nodiscard]] std::size_t wait(int timeout_ms);
  // Calls the handlers of the events that wait() found, except those removed since.
  void dispatch(std::size_t count);
  // Ends the present or the next wait(). May be called on any thread, also after close().
  void wake() noexcept;
  // Gives the descriptors back. After it there is no wait(), and nothing more to watch.
  void close() noexcept;

 private:
  struct Watched {
    std::uint32_t ticket = 0;  // tells a descriptor from an earlier one of the same number
    Handler* handler = nullptr;
  };

  std::mutex wakeup_mutex_;  // so that no wake() meets a descriptor of another's
  Descriptor epoll_, wakeup_;
  std::uint32_t tickets_ = 0;
  std::unordered_map<int, Watched> watched_;
  std::vector<epoll_event> found_;
};

}  // namespace adaptra::delegate
