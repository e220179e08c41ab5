#include "delegate/tcp/tcp_pace.h"

#include <linux/inet_diag.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <cstring>
#include <string_view>
#include <utility>

namespace adaptra::delegate {
namespace {

// Round trip of a long link. On a shorter one a full window says only that the receiver is slow.
constexpr std::chrono::microseconds kLong{2000};
constexpr std::string_view kSteady = "cubic", kStopping = "bbr";
// Packets between two checks for loss. A connection is lossy if more than one in a hundred was repeated.
constexpr std::uint64_t kPackets = 1000;

// The round trip by which the congestion control sizes its window: only BBR has such a number, and reports it.
std::chrono::microseconds believed_round_trip(int socket, std::uint32_t measured_us) noexcept {
  tcp_cc_info control{};
  socklen_t size = sizeof control;
  const bool is_told = getsockopt(socket, IPPROTO_TCP, TCP_CC_INFO, &control, &size) == 0 && size == sizeof control.bbr;
  return std::chrono::microseconds(is_told ? control.bbr.bbr_min_rtt : measured_us);
}

}  // namespace

TcpPace::TcpPace(int socket) {
  char name[16]{};
  socklen_t size = sizeof name;
  if (getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name, &size) != 0) return;
  const std::string_view systems(name, strnlen(name, size));
  if (!systems.starts_with(kStopping)) return;
  // The system may allow no other; then BBR stays.
  if (setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, kSteady.data(), kSteady.size()) == 0) systems_ = systems;
}

void TcpPace::give_back_if_lossy(int socket, std::uint64_t sent, std::uint64_t repeated) noexcept {
  if (systems_.empty() || sent - sent_ < kPackets) return;
  const std::uint64_t sent_since = sent - std::exchange(sent_, sent);
  const std::uint64_t repeated_since = repeated - std::exchange(repeated_, repeated);
  if (100 * repeated_since <= sent_since) return;
  setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, systems_.data(), static_cast<socklen_t>(systems_.size()));
  systems_.clear();
}

std::uint64_t TcpPace::held(int socket) noexcept {
  tcp_info info{};
  socklen_t size = sizeof info;
  // A round trip that was never measured is all ones.
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 || info.tcpi_min_rtt == ~0U) return 0;
  return static_cast<std::uint64_t>(static_cast<double>(info.tcpi_delivery_rate) * info.tcpi_min_rtt / 1e6);
}

Pace TcpPace::read(int socket) noexcept {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
  give_back_if_lossy(socket, info.tcpi_data_segs_out, info.tcpi_total_retrans);
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
