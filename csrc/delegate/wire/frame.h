// Frames: the messages of two ranks on an authenticated connection, with a fixed header and a bounded payload.
//
// Every wire carries the same frames. A stream carries the bytes as they are; verbs writes a chunk's payload into the peer's
// memory and carries the header beside it. Numbers are little-endian.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace adaptra::delegate {

inline constexpr std::size_t kFrameBytes = 64;
// The bytes of a message that travel ahead of it while no slot fits: the message's own header, which says what it is.
inline constexpr std::size_t kHeadBytes = 192;
inline constexpr std::uint32_t kMaxChunkBytes = 1U << 20;

enum class FrameKind : std::uint8_t {
  kChunk = 1,      // source → destination: a part of a message, for one slot of the destination
  kHead = 2,       // source → destination: the next message, for which no slot has been granted; the payload is its head
  kResync = 3,     // source → destination: tell everything again, frames may have been lost. Bit k of `sequence`: path k is
                   // given up here, let nothing arrive by it any more. `generation` counts these
  kGrant = 4,      // destination → source: a slot is free for one message of exactly `total` bytes
  kAck = 5,        // destination → source: message `sequence` is complete and its checksums are right
  kHeartbeat = 6,  // both ways: this connection lives
  kWiden = 7,      // source → destination: one connection can't fill this path, make one more
  kBye = 8,        // both ways: this rank closes its transport; nothing follows
  kExpose = 9,     // destination → source, verbs only: where a slot lies (the payload is the wire's own)
  kHave = 10,      // destination → source: bytes `offset` up to `total` of message `sequence` are here; answers a kResync
  kResynced = 11,  // destination → source: the kResync of this `generation` has been answered in full
};

// The header of a frame. Fields that a kind doesn't need are zero.
struct Frame {
  FrameKind kind = FrameKind::kHeartbeat;
  std::uint32_t slot = 0;        // kChunk, kGrant, kExpose
  std::uint32_t generation = 0;  // kChunk, kGrant: how often the slot had been granted before, so that a late chunk is told
                                 // apart; kResync, its answers
  std::uint64_t sequence = 0;    // kChunk, kHead, kAck, kHave: the message's number on its channel, from 0
  std::uint64_t offset = 0;      // kChunk: of the payload within the message
  std::uint64_t attempt = 0;     // kChunk, kHead: in which the message was sent, from 0; messages of earlier ones are dropped
  std::uint64_t first = 0;       // kChunk, kHead: the number of the first message of that attempt
  std::uint64_t total = 0;       // kChunk, kHead: the message's bytes; kGrant, kExpose: the slot's
  std::uint32_t length = 0;      // bytes of payload behind the header
  std::uint32_t checksum = 0;    // CRC32C of the payload
};

using FrameBytes = std::array<std::byte, kFrameBytes>;

[[nodiscard]] FrameBytes encode(const Frame& frame);

// The header's own checksum, its last field, which covers the checksum of the payload too.
[[nodiscard]] std::uint32_t header_checksum(const FrameBytes& header);

// Reads a header and checks all that can be checked without knowing the channel. False, with a reason for people, if it is
// none.
[[nodiscard]] bool decode(std::span<const std::byte, kFrameBytes> bytes, Frame& frame, std::string& reason);

}  // namespace adaptra::delegate
