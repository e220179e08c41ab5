// Whole numbers as they stand on the wire: the lowest byte first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace adaptra::delegate {

inline void put(std::span<std::byte> bytes, std::size_t at, std::size_t size, std::uint64_t value) {
  for (std::size_t k = 0; k < size; ++k) bytes[at + k] = static_cast<std::byte>(value >> (8 * k));
}

[[nodiscard]] inline std::uint64_t get(std::span<const std::byte> bytes, std::size_t at, std::size_t size) {
  std::uint64_t value = 0;
  for (std::size_t k = 0; k < size; ++k) value |= std::to_integer<std::uint64_t>(bytes[at + k]) << (8 * k);
  return value;
}

[[nodiscard]] inline std::uint32_t get32(std::span<const std::byte> bytes, std::size_t at) {
  return static_cast<std::uint32_t>(get(bytes, at, 4));
}

}  // namespace adaptra::delegate
