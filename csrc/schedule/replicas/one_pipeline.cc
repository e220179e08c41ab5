#include "schedule/replicas/one_pipeline.h"

#include <limits>

#include "schedule/replicas/search_period.h"

namespace adaptra::schedule {
namespace {

// A microbatch without memory fits anywhere.
Room room_of(const Problem& problem) {
  const Cost& cost = problem.cost;
  Room room{cost.memory_limit, cost.memory_forward, cost.memory_input_grad};
  if (room.most.empty()) {
    room.most.assign(static_cast<std::size_t>(problem.ranks), std::numeric_limits<double>::infinity());
  }
  return room;
}

}  // namespace

std::optional<PipelinePlan> search_period_of(const Problem& problem, const PipelineSearch& search) {
  const Job job = job_of(problem);
  PeriodSearch options{room_of(problem), search.effort, search.seed, search.enough, search.stop, search.start};
  const std::optional<JobPlan> found = search_period(job, options);
  if (!found) return std::nullopt;
  PipelinePlan plan{found->period, std::vector<Order>(found->orders.size())};
  for (std::size_t rank = 0; rank < plan.orders.size(); ++rank) {
    for (const JobOp& op : found->orders[rank]) {
      if (op.kind != JobKind::Reduce && op.kind != JobKind::Step)
        plan.orders[rank].push_back({op.stage, static_cast<Kind>(op.kind), op.microbatch});
    }
  }
  return plan;
}

}  // namespace adaptra::schedule
