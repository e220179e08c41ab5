// What the kernel tells about a TCP connection's pace.
#pragma once

#include <cstdint>

#include "delegate/wire.h"

namespace adaptra::delegate {

class TcpPace {
 public:
  // Looks at the socket; what it returns is since the last call. Of a socket that the kernel says nothing about: nothing.
  [[nodiscard]] Pace read(int socket) noexcept;

 private:
  std::uint64_t limited_us_ = 0, busy_us_ = 0;
};

}  // namespace adaptra::delegate
