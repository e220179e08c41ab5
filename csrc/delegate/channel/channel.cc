#include "delegate/channel/channel.h"

#include <cerrno>
#include <utility>

#include "delegate/system/crc32c.h"
#include "delegate/system/sockets.h"

namespace adaptra::delegate {
namespace {

// A peer's process has ended if its host refuses connections on every path, and still does this long after the last path was
// lost. How slow either process is doesn't matter: what counts is when the host was asked, not how long nothing was heard.
constexpr Clock::duration kGoneAfter = std::chrono::milliseconds(500);

}  // namespace

Channel::Channel(Host& host, const Address& address, std::uint32_t peer, const std::vector<std::string>& paths)
    : host_(host), address_(address), peer_(peer), paths_(paths) {}

void Channel::connected(Descriptor socket, const Address& address, bool opened_here) {
  if (!failure_.empty()) return;
  if (paths_.has(address)) fail_path(address.path, "its peer opened it anew");
  try {
    paths_.add(address, host_.wire(address.path).adopt(socket.release(), address, opened_here, *this));
  } catch (const std::exception& error) {
    not_connected(address, error.what());
  }
}

void Channel::not_connected(const Address& address, const std::string& reason) {
  paths_.record_attempt(address.path, reason == error_text(ECONNREFUSED), Clock::now());
  opening_failed(address, reason);
}

void Channel::established(Connection& connection) {
  const auto now = Clock::now();
  ever_up_ = true;
  if (!failure_.empty()) return;
  path_up(paths_.established(connection, now), connection);
}

void Channel::control(Connection& connection, const Frame& frame, std::span<const std::byte> payload) {
  const auto path = paths_.path_of(connection);
  if (!path) return;
  if (crc32c(payload) != frame.checksum) return fail_path(*path, "a frame is corrupted: its checksum is wrong");
  switch (frame.kind) {
    case FrameKind::kHeartbeat: return;
    case FrameKind::kBye:
      // A bye is sent on every path, and frames sent before it on another path may still be on their way.
      is_peer_leaving_ = true;
      return fail_path(*path, "its peer closed its transport");
    case FrameKind::kExpose: return fail_path(*path, "got a frame that belongs to another wire");
    case FrameKind::kChunk:
    case FrameKind::kHead:
    case FrameKind::kResync:
    case FrameKind::kGrant:
    case FrameKind::kAck:
    case FrameKind::kWiden:
    case FrameKind::kHave:
    case FrameKind::kResynced: break;
  }
  if (const std::string refusal = handle(connection, frame, payload); !refusal.empty()) fail_path(*path, refusal);
}

void Channel::failed(Connection& connection, std::string reason) {
  if (const auto path = paths_.path_of(connection)) fail_path(*path, reason);
}

void Channel::fail_path(std::size_t path, const std::string& reason) {
  const bool was_up = paths_.fail(path, reason);
  if (was_up) {
    Stats::add(stats_.path_failures);
    if (!paths_.any_up()) down_since_ = Clock::now();
  }
  if (failure_.empty() && is_peer_leaving_ && !paths_.any_up()) {
    return fail("rank " + std::to_string(peer_) + " closed its transport");
  }
  if (failure_.empty()) path_failed(path);
}

void Channel::end(const std::string& reason) {
  if (!failure_.empty()) return;
  failure_ = reason;
  fail_pending(reason);
}

void Channel::fail(const std::string& reason) {
  end(reason);
  for (std::size_t path = 0; path < paths_.size(); ++path) paths_.fail(path, reason);
}

void Channel::tick(Clock::time_point now) {
  if (!failure_.empty()) return;
  const Timing& timing = host_.timing();
  while (const auto silent = paths_.find_silent(now, timing.silence)) {
    const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(timing.silence).count();
    fail_path(*silent, "nothing came for " + std::to_string(limit) + " ms");
  }
  if (now - last_heartbeat_ >= timing.heartbeat) {
    last_heartbeat_ = now;
    for (std::size_t path = 0; path < paths_.size(); ++path) {
      for (Connection* connection : paths_[path].up) send_control(*connection, Frame{});
    }
  }
  every_tick(now);
  give_up_if_lost(now);
}

void Channel::give_up_if_lost(Clock::time_point now) {
  if (!is_cut_off()) {
    if (!ever_up_ && !has_pending()) down_since_ = now;
    return;
  }
  const auto refused_at = paths_.all_refused_at();
  const bool is_gone = ever_up_ && refused_at && *refused_at - down_since_ >= kGoneAfter;
  if (!is_gone && now - down_since_ < host_.timing().lost_after) return;
  const std::string who = "rank " + std::to_string(peer_);
  fail((is_gone ? who + " is gone: " : "no path to " + who + " is left: ") + paths_.describe());
}

void Channel::send_control(Connection& connection, const Frame& frame, std::span<const std::byte> payload) {
  Frame said = frame;
  said.length = static_cast<std::uint32_t>(payload.size());
  said.checksum = crc32c(payload);
  connection.send(said, payload);
  wants_flush();
}

void Channel::send_bye() {
  for (std::size_t path = 0; path < paths_.size(); ++path) {
    for (Connection* connection : paths_[path].up) send_control(*connection, Frame{.kind = FrameKind::kBye});
  }
}

void Channel::wants_flush() {
  if (!std::exchange(flush_wanted_, true)) host_.wants_flush(*this);
}

void Channel::flush() {
  flush_wanted_ = false;
  for (std::size_t path = 0; path < paths_.size(); ++path) {
    for (Connection* connection : paths_[path].up) connection->flush();
  }
}

}  // namespace adaptra::delegate
