#include "schedule/judge.h"

#include <cstddef>
#include <limits>

#include "schedule/simulate.h"

namespace adaptra::schedule {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kTolerance = 1e-9;

}  // namespace

Judge::Judge(const Problem& problem, const Rule& rule, const std::vector<std::int32_t>& in_flight)
    : problem_(problem),
      rule_(rule),
      in_flight_(in_flight),
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
  if (!within_limits(to_orders(sequences, problem_.cost.stages()))) return false;
  best_makespan_ = makespan;
  best_ = sequences;
  return true;
}

bool Judge::within_limits(const std::vector<Order>& orders) const {
  const Peaks peak = peaks(problem_, orders);
  for (std::size_t stage = 0; stage < in_flight_.size(); ++stage)
    if (peak.in_flight[stage] > in_flight_[stage]) return false;
  const std::vector<double>& limit = problem_.cost.memory_limit;
  for (std::size_t rank = 0; rank < limit.size(); ++rank)
    if (peak.memory[rank] > limit[rank] + kTolerance) return false;
  return true;
}

}  // namespace adaptra::schedule
