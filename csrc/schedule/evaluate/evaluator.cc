#include "schedule/evaluate/evaluator.h"

#include "schedule/simulate/constants.h"

namespace adaptra::schedule {
Evaluator::Evaluator(const Problem& problem, const std::vector<std::int32_t>& in_flight)
    : problem_(problem),
      limits_(problem, in_flight),
      is_covered_(FastSimulator::covers(problem)),
      ops_(static_cast<std::int64_t>(3) * problem.stages * problem.microbatches),
      simulator_(problem),
      exact_simulator_(problem, 1),
      best_makespan_(kNever) {}

double Evaluator::evaluate(const std::vector<Sequence>& sequences) {
  const double makespan = time(sequences, kNever);
  return makespan < kNever && keep(sequences, makespan) ? makespan : kNever;
}

void Evaluator::consider(const std::vector<Sequence>& sequences) {
  if (!limits_.hold(sequences)) return;
  const double makespan = time(sequences, best_makespan_);
  if (makespan >= best_makespan_) return;
  best_makespan_ = makespan;
  best_ = sequences;
}

bool Evaluator::keep(const std::vector<Sequence>& sequences, double makespan) {
  if (makespan >= best_makespan_) return true;
  if (!limits_.hold(sequences)) return false;
  best_makespan_ = makespan;
  best_ = sequences;
  return true;
}

double Evaluator::time(const std::vector<Sequence>& sequences, double at_most) {
  if (is_covered_) return simulator_.makespan(sequences, at_most);
  const Simulated found = exact_simulator_.run(to_orders(sequences, problem_.stages));
  return found.complete && found.makespan <= at_most ? found.makespan : kNever;
}

}  // namespace adaptra::schedule
