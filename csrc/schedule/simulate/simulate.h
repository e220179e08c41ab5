// Exact simulation of a compute-only program. There are no time steps. It adds and compares the same doubles in the same order
// wherever it runs, so results are equal to the last digit on every machine.
//
// A rank executes its order strictly; an op starts as soon as the one before it has ended and its inputs are there. A message
// whose producer ends at e departs at d = max(e, edge free). It occupies the edge until d + occupancy and arrives at d +
// occupancy + latency.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/simulate/types.h"

namespace adaptra::schedule {

struct Interval {
  double start;
  double end;
};

// One message from a stage to its neighbour: handed over at `posted`, on the edge from `departed`, there at `arrived`.
struct Message {
  std::int32_t source;
  std::int32_t destination;
  std::int32_t microbatch;
  double posted;
  double departed;
  double arrived;
};

// The detail to record. A planner that compares makespans needs no more than the summary.
enum class Detail : std::uint8_t { Summary, Times };

struct Result {
  bool complete = false;  // false: a deadlock, and every other field is meaningless
  double makespan = 0.0;
  std::vector<double> busy, first_start, last_end;  // per rank; zero for a rank without ops
  std::vector<std::vector<Interval>> ops;           // per rank, parallel to its order; empty without Detail::Times
  std::vector<Message> messages;                    // in no promised order; empty without Detail::Times
};

// Most microbatches in flight per stage (F started, I or B not ended), and most memory held per rank, by the same accounting as
// adaptra.simulation.cost.CostModel. A program without gradients keeps nothing for them: there an F frees at its end what it
// allocated.
struct Peaks {
  std::vector<std::int32_t> in_flight;
  std::vector<double> memory;
};

// True when every op lies on its stage's rank, names a microbatch that exists, and occurs once.
[[nodiscard]] bool well_formed(const Problem& problem, const std::vector<Order>& orders);

// Requires well_formed(problem, orders). Throws std::invalid_argument when the rule can't be met by messages between
// neighbours.
[[nodiscard]] Result simulate(const Problem& problem, const std::vector<Order>& orders, const Rule& rule,
                              Detail detail = Detail::Summary);

// Requires well_formed(problem, orders). Needs no times: a rank executes one op at a time, so its order decides.
[[nodiscard]] Peaks peaks(const Problem& problem, const std::vector<Order>& orders);

}  // namespace adaptra::schedule
