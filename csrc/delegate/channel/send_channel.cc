#include "delegate/channel/send_channel.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "delegate/system/crc32c.h"

namespace adaptra::delegate {
namespace {

constexpr std::size_t kMostSlots = 1U << 16;
// A message of at most this size is sent again at once when its path fails, without asking what has arrived of it.
constexpr std::uint64_t kMostAgain = 512U << 10;
// A message whose path keeps failing is cut into smaller chunks, down to this size: a chunk that is cut off comes again.
constexpr std::uint32_t kLeastChunkBytes = 16U << 10;
constexpr std::uint32_t kMostHalvings = 5;
// Bytes of a sum that may be on their way however small its messages are: next to no time on a fast port.
constexpr std::uint64_t kLeastAhead = 1U << 20;
constexpr Clock::duration kProbeEvery = std::chrono::milliseconds(300);

std::uint64_t nanoseconds(Clock::duration duration) {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count());
}

}  // namespace

SendChannel::SendChannel(Host& host, const Address& address, const std::vector<std::string>& paths)
    : Channel(host, address, address.destination, paths) {}

void SendChannel::submit(std::shared_ptr<Request> request, std::shared_ptr<const Pages> message, std::size_t bytes,
                         Clock::time_point posted_at) {
  if (!failure_.empty()) return request->fail(failure_);
  Stats::add(stats_.posted);
  queue_.push_back({.sequence = sequence_++,
                    .attempt = host_.attempt(),
                    .first = first_,
                    .request = std::move(request),
                    .message = std::move(message),
                    .total = bytes,
                    .posted_at = posted_at,
                    .begun_at = {},
                    .cursor = 0,
                    .grant = std::nullopt,
                    .paths = 0,
                    .there = {},
                    .cuts = 0,
                    .is_unknown = false,
                    .is_begun = false,
                    .is_sent = false});
  pump();
  probe_peer(Clock::now());
}

// Messages of earlier attempts still go, since the destination counts on every number.
void SendChannel::begin() { first_ = sequence_; }

std::span<std::byte> SendChannel::place(const Frame&, std::string& refusal) {
  refusal = "got a chunk from the rank that should receive them";
  return {};
}

void SendChannel::bare_message(Connection& connection, std::uint32_t, std::uint32_t) {
  if (const auto path = paths_.path_of(connection)) fail_path(*path, "got a message from the rank that should receive them");
}

void SendChannel::path_up(std::size_t path, Connection&) {
  if (path_ == path) Stats::set(stats_.connections, paths_[path].up.size());
  choose_path(Clock::now());
}

void SendChannel::path_failed(std::size_t path) {
  const std::uint64_t bit = std::uint64_t{1} << path;
  for (std::size_t k = 0; k < queue_.size(); ++k) {
    Outgoing& message = queue_[k];
    if ((message.paths & bit) == 0) continue;
    message.cursor = 0;
    message.there.clear();
    // Asking takes a round trip, which is longer than sending a short message again.
    message.is_unknown = message.total > kMostAgain;
    ++message.cuts;
    message.paths = 0;
    next_ = std::min(next_, k);
    Stats::add(stats_.retries);
  }
  ++resyncs_;
  const auto now = Clock::now();
  const bool was_used = path_ == path;
  if (was_used) {
    path_.reset();
  } else if (path_) {
    resync();
  }
  choose_path(now);
  if (was_used && path_) {
    const std::uint64_t outage = nanoseconds(now - paths_[path].heard);
    Stats::set(stats_.longest_outage_ns, std::max(outage, stats_.longest_outage_ns.load(std::memory_order_relaxed)));
  }
  pump();
}

// Asks on each path whether the destination's process lives. The destination opens all connections of a channel. A source that
// has none left opens one only to learn whether a process answers, and both ends close it at once. The destination of a
// channel that gives way learns by it that there is something to open.
void SendChannel::probe_peer(Clock::time_point now) {
  const bool is_closed = gives_way(address_.channel) && has_pending() && !is_connected();
  if (!(is_closed || is_cut_off()) || probing_ != 0 || now < probe_not_before_) return;
  probe_not_before_ = now + kProbeEvery;
  for (std::uint32_t path = 0; path < paths_.size(); ++path) {
    Address address = address_;
    address.path = path;
    probing_ |= std::uint64_t{1} << path;
    host_.open(address);
  }
}

void SendChannel::probe_answered(const Address& address) {
  probing_ &= ~(std::uint64_t{1} << address.path);
  paths_.record_attempt(address.path, false, Clock::now());
}

void SendChannel::opening_failed(const Address& address, const std::string& reason) {
  probing_ &= ~(std::uint64_t{1} << address.path);
  // A path that the destination is opening is not down.
  if (paths_[address.path].connections.empty()) paths_.fail(address.path, reason);
}

void SendChannel::choose_path(Clock::time_point now) {
  const auto chosen = paths_.choose(path_, now, host_.timing().healthy_for);
  if (!chosen || chosen == path_) return;
  if (last_path_ && last_path_ != chosen) Stats::add(stats_.path_changes);
  last_path_ = chosen;
  path_ = chosen;
  width_ = StripeWidth(now);
  Stats::set(stats_.connections, paths_[*path_].up.size());
  resync();
  pump();
}

// Has acknowledgements and grants repeated, as some may have been lost with a path. Chunks on a path that was given up here
// must reach no slot any more. So the destination is told to give that path up as well.
void SendChannel::resync() {
  announced_.reset();
  std::uint64_t down = 0;
  for (std::size_t path = 0; path < paths_.size(); ++path) {
    if (!paths_.is_up(path)) down |= std::uint64_t{1} << path;
  }
  send_control(*paths_[*path_].up.front(), Frame{.kind = FrameKind::kResync, .generation = ++resyncs_, .sequence = down});
}

std::string SendChannel::handle(Connection&, const Frame& frame, std::span<const std::byte>) {
  switch (frame.kind) {
    case FrameKind::kGrant:
      if (frame.slot >= kMostSlots) return "grants slot " + std::to_string(frame.slot);
      granted(frame);
      return {};
    case FrameKind::kAck:
      if (frame.sequence >= sequence_ || frame.total > sequence_) {
        return "acknowledges message " + std::to_string(frame.sequence) + " of " + std::to_string(sequence_);
      }
      acknowledged(frame.sequence, frame.total);
      return {};
    case FrameKind::kHave: return had(frame);
    case FrameKind::kResynced:
      if (frame.generation == resyncs_) resynced();
      return {};
    case FrameKind::kChunk:
    case FrameKind::kHead:
    case FrameKind::kResync:
    case FrameKind::kHeartbeat:
    case FrameKind::kWiden:
    case FrameKind::kBye:
    case FrameKind::kExpose: return "got a frame that only the source of messages sends";
  }
  return {};
}

void SendChannel::granted(const Frame& frame) {
  const auto [found, is_new] = generations_.try_emplace(frame.slot, frame.generation);
  if (!is_new && frame.generation <= found->second) return;  // repeated after a path had failed
  found->second = frame.generation;
  free_[frame.total].push_back({frame.slot, frame.generation});
  pump();
}

std::string SendChannel::had(const Frame& frame) {
  if (frame.generation != resyncs_) return {};
  const auto found = std::find_if(queue_.begin(), queue_.end(),
                                  [&frame](const Outgoing& message) { return message.sequence == frame.sequence; });
  if (found == queue_.end()) return {};
  if (frame.offset >= frame.total || frame.total > found->total || !found->grant) {
    return "has bytes " + std::to_string(frame.offset) + " to " + std::to_string(frame.total) + " of message " +
           std::to_string(frame.sequence) + ", which it never got";
  }
  if (found->is_unknown) found->there.add(frame.offset, frame.total);
  return {};
}

void SendChannel::resynced() {
  for (Outgoing& message : queue_) message.is_unknown = false;
  pump();
}

void SendChannel::acknowledged(std::uint64_t sequence, std::uint64_t below) {
  for (std::size_t k = 0; k < queue_.size();) {
    Outgoing& message = queue_[k];
    if (message.sequence != sequence && message.sequence >= below) {
      ++k;
      continue;
    }
    finish(message);
    queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(k));
    if (k < next_) --next_;
  }
  pump();
}

void SendChannel::finish(Outgoing& message) {
  const auto now = Clock::now();
  Stats::add(stats_.acknowledged);
  Stats::add(stats_.bytes, message.total);
  Stats::add(stats_.queued_ns, nanoseconds(message.begun_at - message.posted_at));
  Stats::add(stats_.flight_ns, nanoseconds(now - message.begun_at));
  Stats::set(stats_.in_flight, stats_.in_flight.load(std::memory_order_relaxed) - (message.is_begun ? 1 : 0));
  if (paths_.holds(message.message->memory())) {
    lingering_.push_back(std::move(message));
  } else {
    message.request->sent(now);
  }
}

void SendChannel::pump() {
  while (path_ && next_ < queue_.size()) {
    Outgoing& message = queue_[next_];
    if (message.is_unknown) return;
    message.cursor = message.there.end_of(message.cursor);
    if (message.cursor == message.total) {
      if (!std::exchange(message.is_sent, true)) Stats::add(stats_.sent);
      ++next_;
      continue;
    }
    if (!take_grant(message)) return announce(message);
    Connection* const connection = pick(message.grant->slot);
    if (connection == nullptr || !host_.may_post(*this)) return;
    post(message, *connection);
  }
}

bool SendChannel::take_grant(Outgoing& message) {
  if (message.grant) return true;
  const auto found = free_.find(message.total);
  if (found == free_.end()) return false;
  // A connection that may still read a slot's earlier message may also still write it there.
  const auto is_free = [this](const Grant& grant) {
    return std::none_of(lingering_.begin(), lingering_.end(),
                        [&](const Outgoing& old) { return old.grant && old.grant->slot == grant.slot; });
  };
  const auto grant = std::find_if(found->second.begin(), found->second.end(), is_free);
  if (grant == found->second.end()) return false;
  message.grant = *grant;
  found->second.erase(grant);
  return true;
}

void SendChannel::writable(Connection&) {
  retire(Clock::now());
  pump();
}

// Completes messages that were acknowledged and that no connection reads any more.
void SendChannel::retire(Clock::time_point now) {
  std::erase_if(lingering_, [&](Outgoing& message) {
    if (paths_.holds(message.message->memory())) return false;
    message.request->sent(now);
    return true;
  });
}

// Sends the head of a message ahead of it. The destination makes slots for messages of its size, and compares it with the
// receive that it expects.
void SendChannel::announce(const Outgoing& message) {
  if (announced_ == message.sequence) return;
  announced_ = message.sequence;
  const auto head = message.message->memory().bytes.first(std::min<std::size_t>(message.total, kHeadBytes));
  send_control(*paths_[*path_].up.front(),
               Frame{.kind = FrameKind::kHead,
                     .sequence = message.sequence,
                     .attempt = message.attempt,
                     .first = message.first,
                     .total = message.total},
               head);
}

Connection* SendChannel::pick(std::uint32_t slot) {
  const auto& up = paths_[*path_].up;
  for (std::size_t tried = 0; tried < up.size(); ++tried) {
    const std::size_t k = next_connection_++ % up.size();
    if (!width_.is_excluded(k, up.size()) && up[k]->can_post(slot)) return up[k];
  }
  return nullptr;
}

bool SendChannel::has_room() const {
  if (!path_) return true;
  const auto& up = paths_[*path_].up;
  return std::all_of(up.begin(), up.end(), [this](const Connection* connection) { return connection->can_post(last_slot_); });
}

bool SendChannel::is_ahead() const {
  if (address_.channel != ChannelClass::kSums || !path_ || next_ >= queue_.size()) return false;
  const auto& up = paths_[*path_].up;
  const std::uint64_t ahead = std::accumulate(up.begin(), up.end(), std::uint64_t{0},
                                              [](std::uint64_t sum, const Connection* one) { return sum + one->ahead(); });
  const Outgoing& message = queue_[next_];
  const std::uint64_t chunk = std::min<std::uint64_t>(message.total - message.cursor, host_.wire(*path_).chunk_bytes());
  return ahead > 0 && ahead + chunk > std::max(message.total, kLeastAhead);
}

void SendChannel::post(Outgoing& message, Connection& connection) {
  const bool is_first = !std::exchange(message.is_begun, true);
  if (is_first) {
    message.begun_at = Clock::now();
    const std::uint64_t begun = stats_.in_flight.load(std::memory_order_relaxed) + 1;
    Stats::set(stats_.in_flight, begun);
    Stats::set(stats_.most_in_flight, std::max(begun, stats_.most_in_flight.load(std::memory_order_relaxed)));
  }
  const std::uint32_t whole = host_.wire(*path_).chunk_bytes();
  const std::uint32_t most = std::max(whole >> std::min(message.cuts, kMostHalvings), std::min(whole, kLeastChunkBytes));
  const std::uint64_t end = message.there.next_after(message.cursor, message.total);
  const std::uint64_t length = std::min<std::uint64_t>(end - message.cursor, most);
  const Memory& memory = message.message->memory();
  const Frame chunk{.kind = FrameKind::kChunk,
                    .slot = message.grant->slot,
                    .generation = message.grant->generation,
                    .sequence = message.sequence,
                    .offset = message.cursor,
                    .attempt = message.attempt,
                    .first = message.first,
                    .total = message.total,
                    .length = static_cast<std::uint32_t>(length),
                    .checksum = crc32c(memory.bytes.subspan(message.cursor, length))};
  connection.post(chunk, memory, is_first && is_next_to_complete(message, length));
  last_slot_ = chunk.slot;
  message.cursor += length;
  message.paths |= std::uint64_t{1} << *path_;
  wants_flush();
}

// Whether a message is one chunk, and will be the next to complete at the destination, which knows its attempt. All messages
// before it that are not acknowledged must have gone the same way, whose order is kept.
bool SendChannel::is_next_to_complete(const Outgoing& message, std::uint64_t length) const {
  const std::uint64_t here = std::uint64_t{1} << *path_;
  const bool is_known = message.attempt == 0 || message.sequence > message.first;
  return length == message.total && is_known && paths_[*path_].up.size() == 1 &&
         std::all_of(queue_.begin(), queue_.begin() + static_cast<std::ptrdiff_t>(next_),
                     [here](const Outgoing& earlier) { return earlier.paths == here; });
}

void SendChannel::every_tick(Clock::time_point now) {
  probe_peer(now);
  choose_path(now);
  if (!lingering_.empty()) {
    retire(now);
    pump();
  }
  if (path_ && width_.is_due(now)) update_width(now);
}

void SendChannel::update_width(Clock::time_point now) {
  const auto& up = paths_[*path_].up;
  Stats::set(stats_.connections, up.size());
  std::vector<Pace> paces;
  for (Connection* connection : up) paces.push_back(connection->pace());
  if (const auto wanted = width_.update(paces, now))
    send_control(*up.front(), Frame{.kind = FrameKind::kWiden, .slot = *wanted});
}

void SendChannel::fail_pending(const std::string& reason) {
  path_.reset();
  next_ = 0;
  for (Outgoing& message : std::exchange(queue_, {})) message.request->fail(reason);
  for (Outgoing& message : std::exchange(lingering_, {})) message.request->sent(Clock::now());
  Stats::set(stats_.in_flight, 0);
}

}  // namespace adaptra::delegate
