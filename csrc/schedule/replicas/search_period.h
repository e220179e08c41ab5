// The search for the orders of several replicas with the shortest period.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "schedule/replicas/list_pass.h"
#include "schedule/simulate/problem.h"

namespace adaptra::schedule {

struct PeriodSearch {
  Room room;                      // the memory of the workers
  std::int64_t effort;            // about how many ops to schedule before giving up
  std::uint64_t seed;             // of all random choices
  double enough;                  // the search ends once the period is no longer
  std::function<bool()> stop;     // asked after every try once there is a plan: true ends the search; may be empty
  std::vector<Order> start = {};  // F, I and W of each worker, tried first and made to fit the memory; may be empty
};

// Schedules by lists with several rules, improves each by passes forwards and backwards, and then tries again around the best
// with random priorities. Orders have Reduce and Step at their ends. Returns nothing if every try ended in a deadlock, which
// only memory limits cause.
[[nodiscard]] std::optional<Plan> search_period(const Problem& problem, const PeriodSearch& search);

}  // namespace adaptra::schedule
