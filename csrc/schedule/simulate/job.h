// The ops, costs and routes of one or several replicas as plain numbers: what adaptra.program.routing and
// adaptra.simulation.case hold, without Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "schedule/simulate/types.h"

namespace adaptra::schedule {

// The directed link between two workers. A message departs once its link and both ports are free, and keeps each of them busy
// for its occupancy. A port that takes no time is always free. It arrives when the last of them is free again, plus the
// latency.
struct Link {
  std::int32_t source;
  std::int32_t destination;
  double latency;
  double occupancy;
};

// The same meaning and units as adaptra.simulation.case.Case.
struct Job {
  JobRule rule;
  std::int32_t replicas = 0, stages = 0, microbatches = 0, workers = 0;
  std::vector<double> forward, input_grad, weight_grad, step, reduce;  // per stage
  std::vector<double> slow;                                            // per worker: the factor on its op times
  std::vector<double> port;                                            // per worker: occupancy of its port by a message
  std::vector<double> latency_forward, latency_backward;      // per edge: of messages between workers without a link below
  std::vector<double> occupancy_forward, occupancy_backward;  // the same
  std::vector<Link> links;
  bool half_duplex = false;  // whether the two directions between two workers share a link, first come first served
  Blocking blocking = Blocking::None;
  double hand_over = 0.0;                          // latency of an accumulator that passes from one worker to another
  bool hands_over = true;                          // whether a W waits for the W of the microbatch before it
  std::vector<std::uint8_t> changing;              // per stage: whether an F waits for the F of the microbatch before it
  bool barrier = false;                            // whether every Step waits for all workers' Reduce
  std::vector<std::int32_t> holder;                // the worker of (replica, stage, microbatch), -1 for none; see index()
  std::vector<std::int32_t> home;                  // per worker: its replica
  std::vector<std::vector<std::int32_t>> columns;  // per stage: its live workers

  [[nodiscard]] std::size_t index(std::int32_t replica, std::int32_t stage, std::int32_t microbatch) const {
    return (static_cast<std::size_t>(replica) * static_cast<std::size_t>(stages) + static_cast<std::size_t>(stage)) *
               static_cast<std::size_t>(microbatches) +
           static_cast<std::size_t>(microbatch);
  }

  [[nodiscard]] double duration(std::int32_t stage, JobKind kind) const {
    const auto s = static_cast<std::size_t>(stage);
    switch (kind) {
      case JobKind::F: return forward[s];
      case JobKind::I: return input_grad[s];
      case JobKind::W: return weight_grad[s];
      case JobKind::B: return input_grad[s] + weight_grad[s];
      case JobKind::Step: return step[s];
      case JobKind::Reduce: return 0.0;  // it begins with the last worker of its stage; see Simulator
    }
    return 0.0;  // unreachable; GCC does not see that the switch is complete
  }
};

// One pipeline, the job of one replica, whose Step takes the time of `Cost::update`. Without Steps in an order, a worker spends
// it after its last op.
[[nodiscard]] Job job_of(const Problem& problem);

}  // namespace adaptra::schedule
