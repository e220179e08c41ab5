// The dependency rule in the form in which a simulation reads it: adaptra.program.dependencies.RULE compiled to columns.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "schedule/simulate/types.h"

namespace adaptra::schedule {

inline constexpr std::size_t kKinds = 4;

// One need of an op: the output of an op of one of `kinds` on the stage at `offset` from its own.
struct Column {
  std::int32_t offset;
  std::uint8_t kinds;
};

// The distinct needs of a rule, the columns. For every kind, which of them it waits for, and which of them it meets. A column
// with an offset is met by a message.
struct CompiledRule {
  std::vector<Column> columns;
  std::array<std::vector<std::size_t>, kKinds> needs;
  std::array<std::vector<std::size_t>, kKinds> meets;

  // Throws std::invalid_argument when an offset is not -1, 0 or +1: messages travel between neighbouring stages only.
  explicit CompiledRule(const Rule& rule);
};

}  // namespace adaptra::schedule
