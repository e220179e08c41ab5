// Orders as the search sees them: for each rank a sequence of kinds and stages, without microbatches. These follow, as every
// kind of op runs in microbatch order on every stage.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/simulate/types.h"

namespace adaptra::schedule {

// The ops of a rank, each as 4 * stage + kind.
using Sequence = std::vector<std::int32_t>;

[[nodiscard]] constexpr std::int32_t code_of(std::int32_t stage, Kind kind) {
  return 4 * stage + static_cast<std::int32_t>(kind);
}
[[nodiscard]] constexpr std::int32_t stage_of(std::int32_t code) { return code / 4; }
[[nodiscard]] constexpr Kind kind_of(std::int32_t code) { return static_cast<Kind>(code % 4); }

[[nodiscard]] std::vector<Sequence> to_sequences(const std::vector<Order>& orders);
[[nodiscard]] std::vector<Order> to_orders(const std::vector<Sequence>& sequences, std::int32_t stages);

}  // namespace adaptra::schedule
