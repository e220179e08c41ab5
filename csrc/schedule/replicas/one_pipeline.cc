#include "schedule/replicas/one_pipeline.h"

#include <limits>

#include "schedule/replicas/search_period.h"

namespace adaptra::schedule {
namespace {

Job job_of(const Problem& problem, const JobRule& rule) {
  const Cost& cost = problem.cost;
  const auto ranks = static_cast<std::size_t>(problem.ranks), stages = problem.placement.size();
  Job job;
  job.rule = rule;
  job.replicas = 1;
  job.stages = cost.stages();
  job.microbatches = problem.microbatches;
  job.workers = problem.ranks;
  job.forward = cost.forward;
  job.input_grad = cost.input_grad;
  job.weight_grad = cost.weight_grad;
  job.step.assign(stages, 0.0);
  job.reduce.assign(stages, 0.0);
  job.slow.assign(ranks, 1.0);
  job.port.assign(ranks, 0.0);
  job.has_ports = false;
  job.latency_forward = cost.latency_forward;
  job.latency_backward = cost.latency_backward;
  job.occupancy_forward = cost.occupancy_forward;
  job.occupancy_backward = cost.occupancy_backward;
  job.changing.assign(stages, 0);
  job.home.assign(ranks, 0);
  for (const std::int32_t rank : problem.placement) {
    job.columns.push_back({rank});
    job.holder.insert(job.holder.end(), static_cast<std::size_t>(problem.microbatches), rank);
  }
  return job;
}

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
  const Job job = job_of(problem, search.rule);
  PeriodSearch options{room_of(problem), search.effort, search.seed, search.enough, search.stop};
  for (const Order& order : search.start) {
    JobOrder& ops = options.start.emplace_back();
    for (const Op& op : order) ops.push_back({0, op.stage, static_cast<JobKind>(op.kind), op.microbatch});
  }
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
