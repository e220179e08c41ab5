// What the kernel tells about a TCP connection's pace, and what sets it: its congestion control.
#pragma once

#include <cstdint>
#include <string>

#include "delegate/wire/wire.h"

namespace adaptra::delegate {

// BBR all but stops for a fifth of a second and a round trip every ten seconds, to see the shortest round trip anew, and for as
// long believes that a link that has turned long is short. Both hold up a step. Where the system's choice is BBR, a connection
// gets CUBIC for as long as it loses next to nothing; where packets are lost BBR is far ahead.
class TcpPace {
 public:
  explicit TcpPace(int socket);

  // Looks at the socket; what it returns is since the last call. Of a socket that the kernel says nothing about: nothing.
  [[nodiscard]] Pace read(int socket) noexcept;

 private:
  void give_back_if_lossy(int socket, std::uint64_t sent, std::uint64_t repeated) noexcept;

  std::string systems_;  // the congestion control that was replaced; empty if none was
  std::uint64_t limited_us_ = 0, busy_us_ = 0;
  std::uint64_t sent_ = 0, repeated_ = 0;  // packets
};

}  // namespace adaptra::delegate
