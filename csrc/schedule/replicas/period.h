// Exact simulation of a program of several replicas that repeats: a worker's next step begins when its last op has ended.
//
// A worker executes its order strictly; an op starts as soon as the one before it has ended and its inputs are there. A Reduce
// ends on all workers of its stage at once, its time after the last of them has come to it. There are no time steps: it adds
// and compares the same doubles in the same order wherever it runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "schedule/replicas/job.h"
#include "schedule/simulate/simulate.h"

namespace adaptra::schedule {

struct Period {
  bool complete = false;                   // false: a deadlock, and every other field is meaningless
  double period = 0.0;                     // the steady distance between the ends of steps, of the slowest worker
  double makespan = 0.0;                   // the end of the first step
  std::vector<std::vector<Interval>> ops;  // per worker: of its order, once per step; empty without Detail::Times
};

// Every op must lie on its holder and occur once. Every microbatch must have F, and I with W or B, on every stage. Each worker
// must have one Reduce and one Step per stage, in this order behind the W of that stage.
//
// The period is taken between the ends of the middle and of the last step. Requires steps >= 2.
[[nodiscard]] Period simulate_period(const Job& job, const std::vector<JobOrder>& orders, std::int32_t steps,
                                     Detail detail = Detail::Summary);

}  // namespace adaptra::schedule
