// Answers that this process lives, from a thread of its own that never runs Python. So a process whose Python is busy can be
// told from one that is frozen or gone. A garbage collection, or a call that holds the interpreter's lock, may take many
// seconds.
//
// A question is a nonce; the answer is its HMAC under a key that the process has published. So neither a stranger that got the
// port later nor a recording is taken for the process.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "delegate/system/descriptor.h"

namespace adaptra::liveness {

inline constexpr std::size_t kNonceBytes = 16;

class Listener {
 public:
  // Listens on a port of `address`, a numeric address of this host, and answers at once. Throws std::invalid_argument and
  // std::system_error.
  Listener(const std::string& address, std::span<const std::byte> key);
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  [[nodiscard]] std::uint16_t port() const noexcept { return port_; }
  // Ends the thread; whoever asks from now on is refused. May be called again.
  void close();
  // Whether this is a forked child's copy, whose thread is the parent's. A copy can't be used or destroyed.
  [[nodiscard]] bool is_copy() const noexcept { return generation_ != delegate::forks::generation(); }

 private:
  struct Asker {
    delegate::Descriptor socket;
    std::string from;
    std::array<std::byte, kNonceBytes> nonce{};
    std::size_t read = 0;
  };

  void run();
  // Returns false if no connection can be accepted for now, for want of descriptors.
  [[nodiscard]] bool accept_all();
  // Ends the oldest connection of the address that has most of them.
  void make_room();
  // Returns true once the asker has been answered or has gone.
  [[nodiscard]] bool serve(Asker& asker) const;

  std::vector<std::byte> key_;
  unsigned generation_ = delegate::forks::generation();
  std::uint16_t port_ = 0;
  delegate::Descriptor listening_, wakeup_;
  std::vector<Asker> askers_;  // in the order of their arrival
  std::thread thread_;
};

}  // namespace adaptra::liveness
