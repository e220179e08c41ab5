// The pace of a TCP connection: what the kernel reports of it, and the congestion control that sets it.
#pragma once

#include <cstdint>
#include <string>

#include "delegate/wire/wire.h"

namespace adaptra::delegate {

// BBR all but stops for a fifth of a second and a round trip every ten seconds, to measure the shortest round trip anew. For as
// long, it believes that a link that has turned long is short. Both hold up a step. So where the system's choice is BBR, a
// connection gets CUBIC while it loses next to nothing. Where packets are lost, BBR is far ahead and is given back.
class TcpPace {
 public:
  explicit TcpPace(int socket);

  // Reads the pace since the last call; an empty one where the kernel reports nothing of the socket.
  [[nodiscard]] Pace read(int socket) noexcept;

  // Bytes that the link holds while none waits for it: those that arrive in its shortest round trip. 0 where that is not known.
  [[nodiscard]] static std::uint64_t held(int socket) noexcept;

 private:
  void give_back_if_lossy(int socket, std::uint64_t sent, std::uint64_t repeated) noexcept;

  std::string systems_;  // the congestion control that was replaced; empty if none was
  std::uint64_t limited_us_ = 0, busy_us_ = 0;
  std::uint64_t sent_ = 0, repeated_ = 0;  // packets
};

}  // namespace adaptra::delegate
