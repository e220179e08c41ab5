// The dependency rule in the form in which a simulation reads it: adaptra.program.dependencies.RULE compiled to columns.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "schedule/simulate/problem.h"

namespace adaptra::schedule {

// One need of an op, and its number among all columns.
struct Column : Row {
  std::size_t index;
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
