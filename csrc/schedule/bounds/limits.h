// Limits on the microbatches in flight on a stage and on the memory of a rank, as the search checks them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "schedule/simulate/problem.h"
#include "schedule/simulate/sequence.h"

namespace adaptra::schedule {

// Tells whether sequences are within limits, and repairs them after ops have moved.
class Limits {
 public:
  // `in_flight` is the most microbatches in flight per stage.
  Limits(const Problem& problem, const std::vector<std::int32_t>& in_flight);

  // Whether sequences are within the limits. Requires that they can be executed.
  [[nodiscard]] bool hold(const std::vector<Sequence>& sequences);

  // Whether a rank's F and I alone can be executed within the limits. Each I must follow its F, and every F must have room once
  // all W that can run have run.
  [[nodiscard]] bool admits(std::size_t rank, const Sequence& sequence);

  // Rewrites one rank's sequence so that every I follows its F, every W its I, and memory suffices. A W that comes too early
  // waits for its I; a W that frees memory for a forward comes before it. False when no W can help.
  [[nodiscard]] bool repair(std::size_t rank, Sequence& sequence);

 private:
  struct Counts {
    std::int32_t forwards, input_grads, weight_grads;
    std::int32_t early, late;  // W ahead of their place, and W that wait for their I
  };

  bool run_weight_grad(std::size_t rank, double& held);

  const Problem& problem_;
  const std::vector<std::int32_t>& in_flight_;
  std::vector<std::vector<std::int32_t>> stages_;  // per rank
  std::vector<double> limit_;                      // per rank
  std::vector<Counts> counts_;
  Sequence repaired_;
};

}  // namespace adaptra::schedule
