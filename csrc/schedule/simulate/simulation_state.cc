#include "schedule/simulate/simulation_state.h"

#include <algorithm>
#include <vector>

namespace adaptra::schedule {

SimulationState::SimulationState(const Problem& problem, const std::vector<Order>& orders, const Rule& rule, Detail detail)
    : problem_(problem),
      orders_(orders),
      rule_(rule),
      times_wanted_(detail == Detail::Times),
      stages_(problem.cost.stages()),
      position_(orders.size(), 0),
      microbatches_(at(problem.microbatches)),
      available_(at(stages_) * microbatches_ * rule_.columns.size(), -1.0) {
  const std::size_t ranks = orders.size();
  result_.busy.assign(ranks, 0.0);
  result_.first_start.assign(ranks, 0.0);
  result_.last_end.assign(ranks, 0.0);
  if (!times_wanted_) return;
  result_.ops.resize(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) result_.ops[rank].reserve(orders[rank].size());
  result_.messages.reserve(2 * at(stages_) * microbatches_);
}

void SimulationState::record(std::int32_t rank, double start, double end) {
  const std::size_t r = at(rank);
  if (position_[r] == 0) result_.first_start[r] = start;
  ++position_[r];
  result_.last_end[r] = end;
  result_.busy[r] += end - start;
  if (times_wanted_) result_.ops[r].push_back({start, end});
}

bool SimulationState::finish() {
  for (std::size_t rank = 0; rank < orders_.size(); ++rank) {
    if (position_[rank] < orders_[rank].size()) return false;
    result_.makespan = std::max(result_.makespan, result_.last_end[rank]);
  }
  return true;
}

}  // namespace adaptra::schedule
