#include "delegate/tcp_pace.h"

#include <linux/inet_diag.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <utility>

namespace adaptra::delegate {
namespace {

// On a shorter link a window that is full says only that the receiver is slow.
constexpr std::chrono::microseconds kLong{2000};

// The round trip by which the congestion control sizes its window: only BBR has such a number, and tells it.
std::chrono::microseconds believed_round_trip(int socket, std::uint32_t measured_us) noexcept {
  tcp_cc_info control{};
  socklen_t size = sizeof control;
  const bool is_told = getsockopt(socket, IPPROTO_TCP, TCP_CC_INFO, &control, &size) == 0 && size == sizeof control.bbr;
  return std::chrono::microseconds(is_told ? control.bbr.bbr_min_rtt : measured_us);
}

}  // namespace

Pace TcpPace::read(int socket) noexcept {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
  const std::uint64_t limited = info.tcpi_sndbuf_limited + info.tcpi_rwnd_limited;
  const std::uint64_t busy_for = info.tcpi_busy_time - std::exchange(busy_us_, info.tcpi_busy_time);
  const std::uint64_t limited_for = limited - std::exchange(limited_us_, limited);
  const auto believed = believed_round_trip(socket, info.tcpi_rtt);
  return {.delivered = info.tcpi_bytes_acked,
          .under_way = std::uint64_t{info.tcpi_unacked} * info.tcpi_snd_mss,
          .round_trip = std::chrono::microseconds(info.tcpi_rtt),
          .believed_round_trip = believed,
          .busy = std::chrono::microseconds(busy_for),
          .is_limited = busy_for > 0 && limited_for > busy_for / 4 && believed >= kLong};
}

}  // namespace adaptra::delegate
