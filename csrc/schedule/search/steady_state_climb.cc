#include "schedule/search/steady_state_climb.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "schedule/simulate/constants.h"

namespace adaptra::schedule {
namespace {

enum class Knob : std::uint8_t { WarmUp, Steady, Patience };

}  // namespace

SteadyStateClimb::SteadyStateClimb(const Problem& problem, const std::vector<std::vector<std::int32_t>>& warm_ups,
                                   const std::vector<std::int32_t>& most, Evaluator& evaluator, Rng& rng)
    : HillClimb(evaluator.timing_effort(), rng),
      problem_(problem),
      most_(most),
      evaluator_(evaluator),
      simulator_(problem),
      orders_(at(problem.workers)) {
  const auto within = [&](std::vector<std::int32_t> counts) {
    for (std::size_t stage = 0; stage < counts.size(); ++stage) counts[stage] = std::clamp(counts[stage], 1, most[stage]);
    return counts;
  };
  for (const std::vector<std::int32_t>& warm_up : warm_ups) {
    for (const std::vector<std::int32_t>& steady : warm_ups) {
      for (const float patience : {1.0F, 0.5F})
        add_start({within(warm_up), within(steady), std::vector<float>(most.size(), patience)});
    }
  }
}

double SteadyStateClimb::time(const Pattern& pattern, double at_most) {
  for (Sequence& order : orders_) order.clear();
  for (std::int32_t stage = 0; stage < problem_.stages; ++stage) {
    Sequence& order = orders_[at(problem_.placement[at(stage)])];
    std::int32_t forwards = 0;
    const auto forward = [&] {
      order.push_back(code_of(stage, Kind::F));
      ++forwards;
    };
    while (forwards < std::min(pattern.warm_up[at(stage)], problem_.microbatches)) forward();
    for (std::int32_t input_grads = 0; input_grads < problem_.microbatches; ++input_grads) {
      order.push_back(code_of(stage, Kind::I));
      if (forwards < problem_.microbatches && forwards - input_grads <= pattern.steady[at(stage)]) forward();
    }
  }
  const double makespan = simulator_.fill(orders_, pattern.patience, at_most + kTolerance);
  return makespan < kNever && evaluator_.keep(simulator_.filled(), makespan) ? makespan : kNever;
}

// Changes one kind of number on a run of neighbouring stages.
void SteadyStateClimb::change(Pattern& pattern) {
  const std::int32_t stages = problem_.stages;
  const std::int32_t first = rng_.below(stages), last = std::min(stages - 1, first + rng_.geometric(stages));
  const auto knob = static_cast<Knob>(rng_.below(3));
  const std::int32_t by = (rng_.below(2) == 0 ? 1 : -1) * (1 + rng_.below(2));
  const float patience = 0.25F * static_cast<float>(rng_.below(6));
  for (std::int32_t stage = first; stage <= last; ++stage) {
    const std::size_t s = at(stage);
    switch (knob) {
      case Knob::WarmUp: pattern.warm_up[s] = std::clamp(pattern.warm_up[s] + by, 1, most_[s]); break;
      case Knob::Steady: pattern.steady[s] = std::clamp(pattern.steady[s] + by, 1, most_[s]); break;
      case Knob::Patience: pattern.patience[s] = patience; break;
    }
  }
}

}  // namespace adaptra::schedule
