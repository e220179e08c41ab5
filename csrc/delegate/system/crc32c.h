// CRC32C (Castagnoli, RFC 3720 appendix B.4), the checksum of a message's chunks and of frame headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace adaptra::delegate {

// The checksum of `bytes`; with `before`, of the bytes whose checksum that is followed by `bytes`. Uses the processor's own
// instruction where it has one.
[[nodiscard]] std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0) noexcept;

// The same by tables, on any processor.
[[nodiscard]] std::uint32_t crc32c_portable(std::span<const std::byte> bytes, std::uint32_t before = 0) noexcept;

// Whether crc32c() uses the processor's instruction.
[[nodiscard]] bool crc32c_is_in_hardware() noexcept;

}  // namespace adaptra::delegate
