// One planning problem as plain numbers: what adaptra.simulation.case and adaptra.program.routing hold, without Python. One
// pipeline is a problem of one replica.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "schedule/simulate/types.h"

namespace adaptra::schedule {

// Whether communication holds the stages; see adaptra.simulation.cost.Blocking.
enum class Blocking : std::uint8_t { None, Send, Both };

// Costs per stage and per edge; edge i joins stages i and i + 1. Same meaning and units as adaptra.simulation.cost.CostModel,
// and as REDUCE and STEP of adaptra.simulation.case.Case.
struct Cost {
  std::vector<double> forward, input_grad, weight_grad;
  std::vector<double> step, reduce;
  std::vector<double> latency_forward, latency_backward;
  std::vector<double> occupancy_forward, occupancy_backward;
  bool half_duplex = false;  // whether the two directions between two workers share a link, first come first served
  Blocking blocking = Blocking::None;
  std::vector<double> memory_forward, memory_input_grad;
  std::vector<double> memory_limit;  // per rank; empty when there is none

  [[nodiscard]] std::int32_t stages() const { return static_cast<std::int32_t>(forward.size()); }

  [[nodiscard]] double duration(std::int32_t stage, Kind kind) const {
    const auto s = static_cast<std::size_t>(stage);
    switch (kind) {
      case Kind::F: return forward[s];
      case Kind::I: return input_grad[s];
      case Kind::W: return weight_grad[s];
      case Kind::B: return input_grad[s] + weight_grad[s];
      case Kind::Step: return step[s];
      case Kind::Reduce: return 0.0;  // it begins with the last worker of its stage; see Simulator
    }
    return 0.0;  // unreachable; GCC does not see that the switch is complete
  }
};

// The directed link between two workers. A message departs once its link and both ports are free, and keeps each of them busy
// for its occupancy. A port that takes no time is always free. It arrives when the last of them is free again, plus the
// latency.
struct Link {
  std::int32_t source;
  std::int32_t destination;
  double latency;
  double occupancy;
};

struct Problem {
  Rule rule;
  Cost cost;
  std::int32_t replicas = 0, stages = 0, microbatches = 0, workers = 0;
  std::vector<std::int32_t> placement;             // per stage: the rank in its replica of the worker that has it
  std::vector<double> slow;                        // per worker: the factor on its op times
  std::vector<double> port;                        // per worker: occupancy of its port by a message
  std::vector<Link> links;                         // those between workers that are not as `cost` says of their edge
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
};

// The problem of one pipeline. Without Steps in an order, a worker spends their time after its last op.
[[nodiscard]] Problem pipeline_of(Rule rule, Cost cost, std::int32_t microbatches, std::vector<std::int32_t> placement);

}  // namespace adaptra::schedule
