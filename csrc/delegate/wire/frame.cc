#include "delegate/wire/frame.h"

#include "delegate/system/crc32c.h"
#include "delegate/system/little_endian.h"

namespace adaptra::delegate {
namespace {

constexpr std::uint64_t kMagic = 0xad47;
constexpr std::uint64_t kVersion = 2;
constexpr std::size_t kChecked = kFrameBytes - 4;  // the header's own checksum is its end

// The most bytes that a frame of this kind may carry behind its header.
std::uint32_t most_payload(FrameKind kind) {
  switch (kind) {
    case FrameKind::kChunk: return kMaxChunkBytes;
    case FrameKind::kHead:
    case FrameKind::kExpose: return kHeadBytes;
    case FrameKind::kResync:
    case FrameKind::kGrant:
    case FrameKind::kAck:
    case FrameKind::kHeartbeat:
    case FrameKind::kWiden:
    case FrameKind::kBye:
    case FrameKind::kHave:
    case FrameKind::kResynced: return 0;
  }
  return 0;
}

}  // namespace

FrameBytes encode(const Frame& frame) {
  FrameBytes bytes{};
  put(bytes, 0, 2, kMagic);
  put(bytes, 2, 1, kVersion);
  put(bytes, 3, 1, static_cast<std::uint64_t>(frame.kind));
  put(bytes, 4, 4, frame.slot);
  put(bytes, 8, 4, frame.generation);
  put(bytes, 12, 4, frame.length);
  put(bytes, 16, 8, frame.sequence);
  put(bytes, 24, 8, frame.offset);
  put(bytes, 32, 8, frame.total);
  put(bytes, 40, 4, frame.checksum);
  put(bytes, 44, 8, frame.attempt);
  put(bytes, 52, 8, frame.first);
  put(bytes, kChecked, 4, crc32c(std::span(bytes).first(kChecked)));
  return bytes;
}

std::uint32_t header_checksum(const FrameBytes& header) { return get32(header, kChecked); }

bool decode(std::span<const std::byte, kFrameBytes> bytes, Frame& frame, std::string& reason) {
  if (get(bytes, 0, 2) != kMagic || get(bytes, 2, 1) != kVersion) {
    reason = "got bytes that are no frame of version 2";
    return false;
  }
  if (get32(bytes, kChecked) != crc32c(bytes.first(kChecked))) {
    reason = "a frame's header is corrupted: its checksum is wrong";
    return false;
  }
  const std::uint64_t kind = get(bytes, 3, 1);
  if (kind < static_cast<std::uint64_t>(FrameKind::kChunk) || kind > static_cast<std::uint64_t>(FrameKind::kResynced)) {
    reason = "got a frame of unknown kind " + std::to_string(kind);
    return false;
  }
  frame.kind = static_cast<FrameKind>(kind);
  frame.slot = get32(bytes, 4);
  frame.generation = get32(bytes, 8);
  frame.length = get32(bytes, 12);
  frame.sequence = get(bytes, 16, 8);
  frame.offset = get(bytes, 24, 8);
  frame.total = get(bytes, 32, 8);
  frame.checksum = get32(bytes, 40);
  frame.attempt = get(bytes, 44, 8);
  frame.first = get(bytes, 52, 8);
  if (frame.length > most_payload(frame.kind)) {
    reason = "a frame of kind " + std::to_string(kind) + " announces " + std::to_string(frame.length) +
             " bytes: expected at most " + std::to_string(most_payload(frame.kind));
    return false;
  }
  if (frame.first > frame.sequence && (frame.kind == FrameKind::kChunk || frame.kind == FrameKind::kHead)) {
    reason =
        "message " + std::to_string(frame.sequence) + " comes before the first of its attempt, " + std::to_string(frame.first);
    return false;
  }
  if (frame.kind == FrameKind::kChunk && frame.length == 0) {
    reason = "got a chunk without bytes";
    return false;
  }
  if (frame.kind == FrameKind::kChunk && (frame.offset > frame.total || frame.length > frame.total - frame.offset)) {
    reason = "a chunk of " + std::to_string(frame.length) + " bytes at " + std::to_string(frame.offset) +
             " lies outside its message of " + std::to_string(frame.total) + " bytes";
    return false;
  }
  return true;
}

}  // namespace adaptra::delegate
