// Constants and conversions that all of the scheduling library uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace adaptra::schedule {

inline constexpr double kNever = std::numeric_limits<double>::infinity();
inline constexpr double kTolerance = 1e-9;  // of sums of times, and of bytes

[[nodiscard]] constexpr std::size_t at(std::int32_t index) { return static_cast<std::size_t>(index); }

}  // namespace adaptra::schedule
