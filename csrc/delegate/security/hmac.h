// SHA-256 (FIPS 180-4) and HMAC (FIPS 198-1): how a connection proves that it belongs to the job.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace adaptra::delegate {

using Digest = std::array<std::byte, 32>;

[[nodiscard]] Digest sha256(std::span<const std::byte> message);

[[nodiscard]] Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> message);

// Equality in a time that doesn't tell where two digests differ.
[[nodiscard]] bool equal_in_constant_time(const Digest& a, const Digest& b) noexcept;

}  // namespace adaptra::delegate
