// One pipeline as a job of one replica: the search for its orders with the shortest period.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "schedule/simulate/types.h"

namespace adaptra::schedule {

// Orders of one pipeline and the steady distance between the ends of their steps.
struct PipelinePlan {
  double period;
  std::vector<Order> orders;
};

struct PipelineSearch {
  std::int64_t effort;          // as those of PeriodSearch
  std::uint64_t seed;           //
  double enough;                //
  std::function<bool()> stop;   //
  std::vector<JobOrder> start;  // F, I and W of each rank, tried first and made to fit the memory; may be empty
};

// Requires an edge whose directions don't share it, and communication that doesn't block.
[[nodiscard]] std::optional<PipelinePlan> search_period_of(const Problem& problem, const PipelineSearch& search);

}  // namespace adaptra::schedule
