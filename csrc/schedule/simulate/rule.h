// The dependency rule in the form in which a simulation reads it: adaptra.program.dependencies.RULE compiled to columns.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "schedule/simulate/problem.h"

namespace adaptra::schedule {

// One need of an op: the output of an op of one of `kinds`, `offset` stages further and `later` microbatches later.
struct Column {
  std::int32_t offset;
  std::int32_t later;
  When when;
  unsigned kinds;     // bit_of(kind) of each
  std::size_t index;  // among all columns
};

// The distinct needs of a problem, the columns, without those that never count in it. For every kind, those that it waits for,
// and those that it meets.
struct CompiledRule {
  std::size_t columns = 0;
  std::array<std::vector<Column>, kKinds> needs;
  std::array<std::vector<Column>, kKinds> meets;

  // Throws std::invalid_argument when an offset is not -1, 0 or +1: messages travel between neighbouring stages only.
  explicit CompiledRule(const Problem& problem);
};

}  // namespace adaptra::schedule
