#include "delegate/channel/receive_channel.h"

#include <algorithm>
#include <utility>

#include "delegate/system/crc32c.h"

namespace adaptra::delegate {
namespace {

// The most stretches of one message that are told to a source that asks. The rest is sent again.
constexpr std::size_t kMostStretches = 4096;

}  // namespace

ReceiveChannel::ReceiveChannel(Host& host, const Address& address, const std::vector<std::string>& paths)
    : Channel(host, address, address.source, paths), openings_(paths.size()) {}

void ReceiveChannel::reserve(std::uint64_t bytes, std::size_t count) {
  Class& known = classes_[bytes];
  known.reserved = std::max(known.reserved, count);
  if (head_ && head_->total == bytes) known.is_wanted = true;
  if (known.is_wanted) make_slots(bytes);
}

void ReceiveChannel::post(std::shared_ptr<Request> request, std::uint64_t bytes) {
  const Key key{host_.attempt(), next_expected_++};
  if (!failure_.empty() && !arrived_.contains(key)) return request->fail(failure_);
  expected_[key] = {std::move(request), bytes};
  want(bytes);
  hand_over(key);
  compare_with_head();
}

void ReceiveChannel::begin() {
  next_expected_ = 0;
  for (auto& [key, expected] : std::exchange(expected_, {})) expected.request->fail("another attempt has begun");
  while (!arrived_.empty() && arrived_.begin()->first.first < host_.attempt()) {
    const std::uint32_t slot = arrived_.begin()->second.slot;
    arrived_.erase(arrived_.begin());
    drop(slot);
  }
  if (head_ && head_->key.first < host_.attempt()) reserve(head_->total, 1);
}

// Frees the slot of a message of an earlier attempt, which has come.
void ReceiveChannel::drop(std::uint32_t slot) {
  Stats::add(stats_.dropped);
  release(slot);
}

// Takes note of the attempt at which the source is, for messages that come without their header.
void ReceiveChannel::hear(const Frame& frame) {
  if (frame.attempt <= source_attempt_) return;
  source_attempt_ = frame.attempt;
  source_first_ = frame.first;
}

void ReceiveChannel::release(std::uint32_t slot) {
  Slot& freed = slots_.at(slot);
  if (freed.state != SlotState::kHeld) return;
  freed.state = SlotState::kGranted;
  freed.covered.clear();
  ++freed.generation;
  grant(slot);
}

void ReceiveChannel::want(std::uint64_t bytes) {
  const auto found = classes_.find(bytes);
  if (found == classes_.end() || std::exchange(found->second.is_wanted, true)) return;
  make_slots(bytes);
}

void ReceiveChannel::make_slots(std::uint64_t bytes) {
  Class& known = classes_[bytes];
  for (; known.made < known.reserved; ++known.made) {
    const auto slot = static_cast<std::uint32_t>(slots_.size());
    slots_.push_back({.pages = host_.make_pages(bytes),
                      .state = SlotState::kGranted,
                      .generation = 0,
                      .sequence = 0,
                      .attempt = 0,
                      .first = 0,
                      .covered = {}});
    for (std::size_t path = 0; path < paths_.size(); ++path) {
      for (Connection* connection : paths_[path].up) {
        connection->expose(slot, slots_[slot].pages->memory());
        wants_flush();
      }
    }
    grant(slot);
  }
}

void ReceiveChannel::grant(std::uint32_t slot) {
  classes_[slots_[slot].pages->memory().bytes.size()].granted.push_back(slot);
  tell(grant_of(slot));
}

ReceiveChannel::Slot* ReceiveChannel::find(const Frame& chunk, std::string& refusal) {
  if (chunk.slot >= slots_.size()) {
    refusal = "a chunk is for slot " + std::to_string(chunk.slot) + " of " + std::to_string(slots_.size());
    return nullptr;
  }
  Slot& slot = slots_[chunk.slot];
  if (chunk.generation > slot.generation) {
    refusal = "a chunk uses slot " + std::to_string(chunk.slot) + " before it was granted";
    return nullptr;
  }
  if (chunk.generation < slot.generation || slot.state == SlotState::kHeld) return nullptr;  // a late chunk
  if (chunk.total != slot.pages->memory().bytes.size()) {
    refusal = "a chunk of a message of " + std::to_string(chunk.total) + " bytes is for slot " + std::to_string(chunk.slot) +
              ", granted for " + std::to_string(slot.pages->memory().bytes.size());
    return nullptr;
  }
  if (is_complete(chunk.sequence) || (slot.state == SlotState::kFilling && slot.sequence != chunk.sequence)) {
    refusal = "message " + std::to_string(chunk.sequence) + " uses slot " + std::to_string(chunk.slot) + " of another one";
    return nullptr;
  }
  return &slot;
}

std::span<std::byte> ReceiveChannel::place(const Frame& chunk, std::string& refusal) {
  Slot* const slot = find(chunk, refusal);
  const std::uint64_t end = chunk.offset + chunk.length;
  // Bytes whose checksum was right are never written again.
  if (slot == nullptr || slot->covered.covers(chunk.offset, end)) return {};
  if (slot->state == SlotState::kGranted) {
    slot->state = SlotState::kFilling;
    slot->sequence = chunk.sequence;
    slot->attempt = chunk.attempt;
    slot->first = chunk.first;
    slot->covered.clear();
  }
  // Chunks may have been cut differently on another path: the overlap has to come again.
  slot->covered.remove(chunk.offset, end);
  return slot->pages->memory().bytes.subspan(chunk.offset, chunk.length);
}

void ReceiveChannel::chunk(Connection& connection, const Frame& chunk) {
  const auto path = paths_.path_of(connection);
  if (!path) return;
  path_ = path;
  std::string refusal;
  const auto place = this->place(chunk, refusal);
  if (!refusal.empty()) return fail_path(*path, refusal);
  if (place.empty()) return Stats::add(stats_.duplicates);
  if (crc32c(place) != chunk.checksum) {
    Stats::add(stats_.corrupted);
    return fail_path(*path, "a chunk of message " + std::to_string(chunk.sequence) + " is corrupted: its checksum is wrong");
  }
  hear(chunk);
  Slot& slot = slots_[chunk.slot];
  slot.covered.add(chunk.offset, chunk.offset + chunk.length);
  if (slot.covered.covers(0, chunk.total)) complete(chunk.slot, connection);
}

// Finds the slot of a message that came without its header. A message that is in none can't be told from a corrupted one.
void ReceiveChannel::bare_message(Connection& connection, std::uint32_t bytes, std::uint32_t checksum) {
  const auto path = paths_.path_of(connection);
  if (!path) return;
  path_ = path;
  if (const auto known = classes_.find(bytes); known != classes_.end()) {
    for (const std::uint32_t index : known->second.granted) {
      Slot& slot = slots_[index];
      if (slot.state != SlotState::kGranted) continue;
      const Frame header{.kind = FrameKind::kChunk,
                         .slot = index,
                         .generation = slot.generation,
                         .sequence = complete_below_,
                         .attempt = source_attempt_,
                         .first = source_first_,
                         .total = bytes,
                         .length = bytes,
                         .checksum = crc32c(slot.pages->memory().bytes)};
      if (header_checksum(encode(header)) != checksum) continue;
      slot.sequence = complete_below_;
      slot.attempt = source_attempt_;
      slot.first = source_first_;
      return complete(index, connection);
    }
  }
  Stats::add(stats_.corrupted);
  fail_path(*path, "message " + std::to_string(complete_below_) + " is corrupted: its checksum is wrong");
}

bool ReceiveChannel::is_complete(std::uint64_t sequence) const {
  return sequence < complete_below_ || complete_above_.contains(sequence);
}

void ReceiveChannel::complete(std::uint32_t index, Connection& connection) {
  Slot& slot = slots_[index];
  slot.state = SlotState::kHeld;
  std::erase(classes_[slot.pages->memory().bytes.size()].granted, index);
  const std::uint64_t sequence = slot.sequence;
  complete_above_.insert(sequence);
  while (complete_above_.erase(complete_below_) > 0) ++complete_below_;
  Stats::add(stats_.acknowledged);
  Stats::add(stats_.bytes, slot.pages->memory().bytes.size());
  send_control(connection, ack_of(sequence));
  if (slot.attempt < host_.attempt()) return drop(index);
  const Key key{slot.attempt, sequence - slot.first};
  arrived_[key] = {index, Clock::now()};
  hand_over(key);
}

void ReceiveChannel::hand_over(const Key& key) {
  const auto expected = expected_.find(key);
  const auto arrived = arrived_.find(key);
  if (expected == expected_.end() || arrived == arrived_.end()) return;
  const auto [slot, at] = arrived->second;
  const bool is_taken = expected->second.request->arrive(slots_[slot].pages, slot, at);
  expected_.erase(expected);
  arrived_.erase(arrived);
  if (!is_taken) release(slot);
}

void ReceiveChannel::compare_with_head() {
  if (!head_) return;
  const auto found = expected_.find(head_->key);
  if (found == expected_.end() || found->second.bytes == head_->total) return;
  found->second.request->arrive_other(head_->bytes);
  expected_.erase(found);
}

std::string ReceiveChannel::handle(Connection& connection, const Frame& frame, std::span<const std::byte> payload) {
  path_ = paths_.path_of(connection);
  switch (frame.kind) {
    case FrameKind::kHead:
      if (is_complete(frame.sequence)) return {};
      hear(frame);
      head_ = Head{frame.sequence,
                   {frame.attempt, frame.sequence - frame.first},
                   frame.total,
                   std::string(reinterpret_cast<const char*>(payload.data()), payload.size())};
      // A message that is dropped needs a slot all the same.
      if (frame.attempt < host_.attempt()) {
        if (const auto [it, is_new] = classes_.try_emplace(frame.total); is_new) it->second.reserved = 1;
      }
      want(frame.total);
      compare_with_head();
      return {};
    case FrameKind::kResync:
      give_up_paths(frame.sequence);
      tell_everything(connection, frame.generation);
      return {};
    case FrameKind::kWiden:
      if (path_) openings_[*path_].wanted = std::clamp(frame.slot, 1U, kMostConnections);
      return {};
    case FrameKind::kChunk:
    case FrameKind::kGrant:
    case FrameKind::kAck:
    case FrameKind::kHeartbeat:
    case FrameKind::kBye:
    case FrameKind::kHave:
    case FrameKind::kResynced:
    case FrameKind::kExpose: return "got a frame that only the destination of messages sends";
  }
  return {};
}

void ReceiveChannel::path_up(std::size_t path, Connection& connection) {
  openings_[path].pause = {};
  for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) connection.expose(slot, slots_[slot].pages->memory());
  for (auto& under_way = openings_[path].under_way; const std::uint32_t index : std::set(under_way)) {
    if (paths_.has({.path = static_cast<std::uint32_t>(path), .index = index})) under_way.erase(index);
  }
  wants_flush();
}

void ReceiveChannel::path_failed(std::size_t path) {
  Opening& opening = openings_[path];
  opening.pause = std::clamp(opening.pause * 2, host_.timing().retry, host_.timing().retry_at_most);
  opening.not_before = Clock::now() + opening.pause;
  opening.wanted = 1;
  opening.under_way.clear();
  if (path_ == path) path_.reset();
}

void ReceiveChannel::opening_failed(const Address& address, const std::string& reason) {
  if (!paths_.is_up(address.path)) return fail_path(address.path, reason);
  Opening& opening = openings_[address.path];
  opening.under_way.erase(address.index);
  opening.not_before = Clock::now() + host_.timing().retry_at_most;
}

void ReceiveChannel::every_tick(Clock::time_point now) {
  for (std::uint32_t path = 0; path < openings_.size(); ++path) {
    Opening& opening = openings_[path];
    if (now < opening.not_before) continue;
    for (std::uint32_t index = 0; index < opening.wanted; ++index) {
      Address address = address_;
      address.path = path;
      address.index = index;
      if (paths_.has(address) || !opening.under_way.insert(index).second) continue;
      host_.open(address);
    }
  }
}

void ReceiveChannel::tell(const Frame& frame) {
  // The source listens on the path on which it sends. If that is gone, it asks again on the next.
  if (path_ && paths_.is_up(*path_)) send_control(*paths_[*path_].up.front(), frame);
}

// Fails the paths that the source has given up. Chunks that they carried may still be on their way here, and slots will be
// granted again.
void ReceiveChannel::give_up_paths(std::uint64_t down) {
  for (std::size_t path = 0; path < paths_.size(); ++path) {
    if ((down >> path & 1) == 0 || path == path_ || !paths_.is_up(path)) continue;
    // A path that was just opened again, and on which the source has sent nothing yet, is not meant.
    const auto is_known = [&](Connection* connection) { return connection->heard() > paths_[path].up_since; };
    if (std::any_of(paths_[path].up.begin(), paths_[path].up.end(), is_known)) fail_path(path, "its peer gave it up");
  }
}

void ReceiveChannel::tell_everything(Connection& connection, std::uint32_t asked) {
  for (std::uint32_t index = 0; index < slots_.size(); ++index) {
    const Slot& slot = slots_[index];
    if (slot.state == SlotState::kGranted) send_control(connection, grant_of(index));
    if (slot.state != SlotState::kFilling) continue;
    std::size_t told = 0;
    for (const auto& [begin, end] : slot.covered.stretches()) {
      if (++told > kMostStretches) break;
      send_control(connection,
                   {.kind = FrameKind::kHave, .generation = asked, .sequence = slot.sequence, .offset = begin, .total = end});
    }
  }
  if (complete_below_ > 0) send_control(connection, ack_of(complete_below_ - 1));
  for (const std::uint64_t sequence : complete_above_) send_control(connection, ack_of(sequence));
  send_control(connection, {.kind = FrameKind::kResynced, .generation = asked});
}

Frame ReceiveChannel::grant_of(std::uint32_t slot) const {
  return {.kind = FrameKind::kGrant,
          .slot = slot,
          .generation = slots_[slot].generation,
          .total = slots_[slot].pages->memory().bytes.size()};
}

Frame ReceiveChannel::ack_of(std::uint64_t sequence) const {
  return {.kind = FrameKind::kAck, .sequence = sequence, .total = complete_below_};
}

void ReceiveChannel::fail_pending(const std::string& reason) {
  path_.reset();
  for (auto& [key, expected] : std::exchange(expected_, {})) expected.request->fail(reason);
}

}  // namespace adaptra::delegate
