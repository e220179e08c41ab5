// Lower bounds on the makespan: no order of ops is shorter. The formulas stand with each function in bounds.cc.
#pragma once

#include <cstdint>

#include "schedule/simulate/problem.h"

namespace adaptra::schedule {

enum class BoundKind : std::uint8_t { Load, Drain, Chain, Memory, LinkForward, LinkBackward, Idle, OneMachine };

// `where` is the stage that binds, the edge (links), or the rank (load and one machine).
struct Bound {
  double value;
  BoundKind kind;
  std::int32_t where;
};

// For each rank, the least time from the end of its last F or I to the end of the step.
[[nodiscard]] std::vector<double> least_tails(const Problem& problem);

// The greatest of all bounds, the simplest of them on a tie. Infinite when one microbatch alone exceeds a memory limit.
[[nodiscard]] Bound lower_bound(const Problem& problem);

}  // namespace adaptra::schedule
