#include "schedule/simulate/problem.h"

#include <algorithm>
#include <utility>

namespace adaptra::schedule {

Problem pipeline_of(Rule rule, Cost cost, std::int32_t microbatches, std::vector<std::int32_t> placement) {
  Problem problem;
  problem.rule = std::move(rule);
  problem.cost = std::move(cost);
  problem.replicas = 1;
  problem.stages = problem.cost.stages();
  problem.microbatches = microbatches;
  for (const std::int32_t rank : placement) {
    problem.workers = std::max(problem.workers, rank + 1);
    problem.columns.push_back({rank});
    problem.holder.insert(problem.holder.end(), static_cast<std::size_t>(microbatches), rank);
  }
  problem.placement = std::move(placement);
  const auto workers = static_cast<std::size_t>(problem.workers);
  problem.slow.assign(workers, 1.0);
  problem.port.assign(workers, 0.0);
  problem.changing.assign(problem.columns.size(), 0);
  problem.home.assign(workers, 0);
  return problem;
}

}  // namespace adaptra::schedule
