// The period of the orders of one pipeline: the time of a step among many in a row.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "schedule/simulate/types.h"

namespace adaptra::schedule {

// The period over so many steps in a row, of which each begins on a rank when the one before has ended there. It is taken
// between the ends of the middle and of the last step, of the slowest rank. Nothing at a deadlock. Requires
// well_formed(problem, orders) and steps >= 2. It repeats the orders in one simulation, so it knows edges whose directions
// share them and communication that blocks.
[[nodiscard]] std::optional<double> period_of(const Problem& problem, const std::vector<Order>& orders, const Rule& rule,
                                              std::int32_t steps);

}  // namespace adaptra::schedule
