// What orders say without any times: whether they are well formed, and what workers hold.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/simulate/problem.h"

namespace adaptra::schedule {

// How much of a step orders hold. Misplaced: an op is not on its holder, names what does not exist, or occurs twice. So are
// Reduce and Step that end a step which is not whole. Forwards: every F and nothing else. Whole: F, and I with W or B, of every
// microbatch on every stage.
enum class Contents : std::uint8_t { Misplaced, Partial, Forwards, Whole };

[[nodiscard]] Contents contents_of(const Problem& problem, const std::vector<Order>& orders);

// Whether each worker runs the F of a replica and stage in microbatch order, and so its I and its W. And whether it updates
// each of its stages once, or none: Reduce stands behind all W of the stage, and Step behind Reduce. Requires orders that are
// not misplaced.
[[nodiscard]] bool keep_order(const Problem& problem, const std::vector<Order>& orders);

// Most microbatches in flight per stage on a worker: F started, I or B not ended. And most memory held per worker, by the same
// accounting as adaptra.simulation.cost.CostModel. A program without gradients keeps nothing for them: there an F frees at its
// end what it allocated.
struct Peaks {
  std::vector<std::int32_t> in_flight;
  std::vector<double> memory;
};

// Requires orders that are not misplaced. Needs no times: a worker executes one op at a time, so its order decides.
[[nodiscard]] Peaks peaks(const Cost& cost, const std::vector<Order>& orders);

}  // namespace adaptra::schedule
