// Times orders for every arm of the search, and keeps the best.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/bounds/limits.h"
#include "schedule/evaluate/fast_simulator.h"
#include "schedule/simulate/problem.h"
#include "schedule/simulate/sequence.h"
#include "schedule/simulate/simulator.h"

namespace adaptra::schedule {

class Evaluator {
 public:
  // `in_flight` is the most microbatches in flight per stage.
  Evaluator(const Problem& problem, const std::vector<std::int32_t>& in_flight);

  // Returns the exact makespan, or infinity when ranks can't execute the sequences within the limits. Keeps the best.
  double evaluate(const std::vector<Sequence>& sequences);

  // Keeps the sequences if they are the best so far. Gives others up as early as it can.
  void consider(const std::vector<Sequence>& sequences);

  // Does the same where the makespan is known and finite. False when the sequences are not within the limits.
  bool keep(const std::vector<Sequence>& sequences, double makespan);

  // Returns the exact makespan, whatever is held. Infinity when it is more than `at_most`, or ranks can't execute the
  // sequences.
  double time(const std::vector<Sequence>& sequences, double at_most);

  // The best so far; an infinite makespan when there is none.
  [[nodiscard]] double best_makespan() const { return best_makespan_; }
  [[nodiscard]] const std::vector<Sequence>& best() const { return best_; }

  // The effort of dispatching a policy, and of timing orders. Measured, so that equal effort takes about equal time.
  [[nodiscard]] std::int64_t dispatch_effort() const { return 2 * ops_; }
  [[nodiscard]] std::int64_t timing_effort() const { return is_covered_ ? 1 + ops_ / 9 : 2 * ops_; }

 private:
  const Problem& problem_;
  Limits limits_;
  const bool is_covered_;
  const std::int64_t ops_;
  FastSimulator simulator_;
  Simulator exact_simulator_;  // of use where the FastSimulator does not cover the problem
  double best_makespan_;
  std::vector<Sequence> best_;
};

}  // namespace adaptra::schedule
