#include "schedule/judge.h"

#include "schedule/numbers.h"
#include "schedule/simulate.h"

namespace adaptra::schedule {
Judge::Judge(const Problem& problem, const Rule& rule, const std::vector<std::int32_t>& in_flight)
    : problem_(problem),
      rule_(rule),
      limits_(problem, in_flight),
      quick_(QuickTimer::covers(problem)),
      ops_(static_cast<std::int64_t>(3) * problem.cost.stages() * problem.microbatches),
      timer_(problem),
      best_makespan_(kNever) {}

double Judge::judge(const std::vector<Sequence>& sequences) {
  double makespan = kNever;
  if (quick_) {
    makespan = timer_.makespan(sequences, kNever);
  } else {
    const Result result = simulate(problem_, to_orders(sequences, problem_.cost.stages()), rule_);
    if (result.complete) makespan = result.makespan;
  }
  return makespan < kNever && keep(sequences, makespan) ? makespan : kNever;
}

bool Judge::keep(const std::vector<Sequence>& sequences, double makespan) {
  if (makespan >= best_makespan_) return true;
  if (!limits_.hold(sequences)) return false;
  best_makespan_ = makespan;
  best_ = sequences;
  return true;
}

}  // namespace adaptra::schedule
