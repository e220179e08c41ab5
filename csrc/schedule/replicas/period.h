// Exact simulation of a program of several replicas that repeats: a worker's next step begins when its last op has ended.
//
// A worker executes its order strictly; an op starts as soon as the one before it has ended and its inputs are there. A Reduce
// ends on all workers of its stage at once, its time after the last of them has come to it. With a barrier a Step waits for the
// Reduce of all workers. There are no time steps: it adds and compares the same doubles in the same order wherever it runs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "schedule/replicas/network.h"
#include "schedule/simulate/simulate.h"

namespace adaptra::schedule {

struct Period {
  bool complete = false;                   // false: a deadlock, and every other field is meaningless
  double period = 0.0;                     // the steady distance between the ends of steps, of the slowest worker
  double makespan = 0.0;                   // the end of the first step
  std::vector<std::vector<Interval>> ops;  // per worker: of its order, once per step; empty without Detail::Times
};

// Simulates several steps of one network, again and again under different orders. The period is taken between the ends of the
// middle and of the last step.
//
// Steps overlap by less than two: a worker reaches step k + 2 only when every worker has reduced in step k. So two slots hold
// all the ends and arrivals that any op still needs.
class PeriodSimulator {
 public:
  // Every op must lie on its holder and occur once. Every microbatch must have F, and I with W or B, on every stage. Each
  // worker must have one Reduce and one Step per stage. Requires steps >= 2. Keeps a reference to the network.
  PeriodSimulator(const Network& network, std::int32_t steps);

  // `sequence` has the nodes of each worker in its order, one worker after the other as in Network::first. Reduce and Step of a
  // stage stand in this order behind its W.
  [[nodiscard]] Period run(const std::vector<std::int32_t>& sequence, Detail detail = Detail::Summary);

 private:
  struct Reduction {
    std::int32_t step = kNone;
    std::size_t come = 0;
    double last = 0.0;
  };
  struct Slot {
    std::vector<double> end, arrival;
    std::vector<Reduction> reduced;  // per stage
    Reduction barrier;               // of all Reduce ops
  };

  void reset(Detail detail);
  [[nodiscard]] bool is_idle(std::size_t worker) const { return network_.first[worker] == network_.first[worker + 1]; }
  [[nodiscard]] bool find_ready(std::int32_t worker, const JobNode& node, std::int32_t step, double& ready);
  [[nodiscard]] bool find_reduced(std::int32_t worker, const JobNode& node, std::int32_t step, double& ready);
  [[nodiscard]] bool find_all_reduced(std::int32_t worker, std::int32_t step, double& ready);
  std::int32_t start(std::int32_t worker);
  void finish(std::int32_t node, std::int32_t step, double end);
  void send(std::int32_t node, std::int32_t step, double posted);
  void run_in_any_order();
  void run_in_time_order();

  const Network& network_;
  const std::int32_t steps_;
  const std::vector<std::int32_t>* sequence_ = nullptr;
  std::array<Slot, 2> slots_;
  std::vector<std::int32_t> done_;                    // per node: the steps in which it has run
  std::vector<std::int32_t> waiting_, next_waiting_;  // per node, the workers that wait for it, as a chain through workers
  std::vector<double> free_;                          // per worker
  std::vector<std::int32_t> position_, step_;         // per worker
  std::vector<double> resource_free_;
  std::vector<std::int32_t> ready_;
  std::vector<std::int32_t> at_barrier_;  // the workers that wait there
  std::size_t reduces_ = 0;               // the Reduce ops of one step
  std::vector<double> ends_;              // per worker and step: the end of its last Step
  std::vector<std::vector<Interval>> times_;
};

}  // namespace adaptra::schedule
