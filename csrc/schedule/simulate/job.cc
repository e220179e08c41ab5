#include "schedule/simulate/job.h"

namespace adaptra::schedule {

Job job_of(const Problem& problem) {
  const Cost& cost = problem.cost;
  const auto ranks = static_cast<std::size_t>(problem.ranks), stages = problem.placement.size();
  Job job;
  job.rule = problem.rule;
  job.replicas = 1;
  job.stages = cost.stages();
  job.microbatches = problem.microbatches;
  job.workers = problem.ranks;
  job.forward = cost.forward;
  job.input_grad = cost.input_grad;
  job.weight_grad = cost.weight_grad;
  job.step = cost.update;
  job.reduce.assign(stages, 0.0);
  job.slow.assign(ranks, 1.0);
  job.port.assign(ranks, 0.0);
  job.latency_forward = cost.latency_forward;
  job.latency_backward = cost.latency_backward;
  job.occupancy_forward = cost.occupancy_forward;
  job.occupancy_backward = cost.occupancy_backward;
  job.half_duplex = cost.half_duplex;
  job.blocking = cost.blocking;
  job.changing.assign(stages, 0);
  job.home.assign(ranks, 0);
  for (const std::int32_t rank : problem.placement) {
    job.columns.push_back({rank});
    job.holder.insert(job.holder.end(), static_cast<std::size_t>(problem.microbatches), rank);
  }
  return job;
}

}  // namespace adaptra::schedule
