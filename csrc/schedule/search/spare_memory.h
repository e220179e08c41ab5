// Makes orders hold less memory within a given makespan or period.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/simulate/problem.h"

namespace adaptra::schedule {

// Puts forwards off, and runs weight gradients before them, while the time is at most `at_most`. With one step that is the
// makespan, with more the period over so many in a row. First it lowers the most that any rank holds, then what each rank
// holds. The orders' F, I and W are each in microbatch order. The result holds no more than `orders` on any rank and stage; it
// is `orders` where these can't be improved.
//
// Counts ops, not time: it ends once about `effort` of them have been timed.
[[nodiscard]] std::vector<Order> spare_memory(const Problem& problem, const std::vector<Order>& orders, double at_most,
                                              std::int64_t effort, std::int32_t steps = 1);

}  // namespace adaptra::schedule
