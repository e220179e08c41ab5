// How many microbatches may be in flight per stage and how much memory a rank may hold, as the search asks for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "schedule/simulate/sequence.h"
#include "schedule/simulate/types.h"

namespace adaptra::schedule {

// Tells whether sequences are within limits, and keeps them executable and within while ops move in them.
class Limits {
 public:
  // `in_flight` is the most microbatches in flight per stage.
  Limits(const Problem& problem, const std::vector<std::int32_t>& in_flight);

  // Whether whole sequences that can be executed are within the limits.
  [[nodiscard]] bool hold(const std::vector<Sequence>& sequences);

  // Whether a rank's F and I alone can be executed within the limits: each I after its F, and room for every F once all W that
  // can run have.
  [[nodiscard]] bool admits(std::size_t rank, const Sequence& sequence);

  // Rewrites one rank's sequence so that every I follows its F, every W its I, and memory suffices: a W that comes too early
  // waits for its I, and one that frees memory a forward needs comes before it. False when no W can help.
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
