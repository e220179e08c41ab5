#include "schedule/search/policy_climb.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "schedule/simulate/constants.h"

namespace adaptra::schedule {
namespace {

// The numbers that a step can change. The backlog is drawn half as often as the rest: measured, that finds shorter plans.
enum class Knob : std::uint8_t { WarmUp, InFlight, PatienceWeight, PatienceForward, Backlog };
constexpr std::array<Knob, 9> kKnobs = {Knob::WarmUp,          Knob::WarmUp,          Knob::InFlight,
                                        Knob::InFlight,        Knob::PatienceWeight,  Knob::PatienceWeight,
                                        Knob::PatienceForward, Knob::PatienceForward, Knob::Backlog};

}  // namespace

PolicyClimb::PolicyClimb(const Problem& problem, const std::vector<std::vector<std::int32_t>>& warm_ups,
                         const std::vector<std::int32_t>& most, Evaluator& evaluator, Rng& rng)
    : HillClimb(evaluator.dispatch_effort(), rng), problem_(problem), most_(most), evaluator_(evaluator), scheduler_(problem) {
  for (const std::vector<std::int32_t>& warm_up : warm_ups) {
    for (const float patience : {0.0F, 1.0F, 0.5F}) {
      for (const bool bounded : {true, false}) {
        Policy policy;
        for (std::size_t stage = 0; stage < most.size(); ++stage) {
          const std::int32_t quota = std::clamp(warm_up[stage], 1, most[stage]);
          policy.stages.push_back(
              {quota, bounded ? quota : most[stage], patience, patience == 1.0F ? 0.5F : 0.0F, problem.microbatches});
        }
        add_start(std::move(policy));
      }
    }
  }
}

double PolicyClimb::time(const Policy& policy, double at_most) {
  return scheduler_.run(policy, at_most + kTolerance) ? evaluator_.evaluate(scheduler_.sequences()) : kNever;
}

void PolicyClimb::change(Policy& policy) {
  const std::int32_t stages = problem_.stages;
  if (problem_.workers < stages && rng_.below(8) == 0) policy.deep_first = !policy.deep_first;
  std::int32_t first = rng_.below(stages), last = first;
  if (rng_.below(2) == 0) last = rng_.below(stages);
  if (first > last) std::swap(first, last);
  const Knob knob = kKnobs[at(rng_.below(static_cast<std::int32_t>(kKnobs.size())))];
  const std::int32_t by = (rng_.below(2) == 0 ? 1 : -1) * (1 + rng_.below(2));
  const float patience = 0.25F * static_cast<float>(rng_.below(5));
  for (std::int32_t stage = first; stage <= last; ++stage) {
    StagePolicy& mine = policy.stages[at(stage)];
    const std::int32_t most = most_[at(stage)];
    switch (knob) {
      case Knob::WarmUp: mine.warm_up = std::clamp(mine.warm_up + by, 1, most); break;
      case Knob::InFlight: mine.in_flight = std::clamp(mine.in_flight + by, 1, most); break;
      case Knob::PatienceWeight: mine.patience_weight = patience; break;
      case Knob::PatienceForward: mine.patience_forward = patience; break;
      case Knob::Backlog: mine.backlog = std::clamp(std::min(mine.backlog, most) + by, 0, most); break;
    }
  }
}

}  // namespace adaptra::schedule
