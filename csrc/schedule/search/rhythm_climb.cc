#include "schedule/search/rhythm_climb.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "schedule/simulate/numbers.h"

namespace adaptra::schedule {
namespace {

enum class Knob : std::uint8_t { WarmUp, Steady, Patience };

}  // namespace

RhythmClimb::RhythmClimb(const Problem& problem, const std::vector<std::vector<std::int32_t>>& warm_ups,
                         const std::vector<std::int32_t>& most, Judge& judge, Dice& dice)
    : problem_(problem), most_(most), judge_(judge), dice_(dice), timer_(problem), orders_(at(problem.ranks)) {
  const auto within = [&](std::vector<std::int32_t> counts) {
    for (std::size_t stage = 0; stage < counts.size(); ++stage) counts[stage] = std::clamp(counts[stage], 1, most[stage]);
    return counts;
  };
  for (const std::vector<std::int32_t>& warm_up : warm_ups) {
    for (const std::vector<std::int32_t>& steady : warm_ups) {
      for (const float patience : {1.0F, 0.5F})
        starts_.push_back({within(warm_up), within(steady), std::vector<float>(most.size(), patience)});
    }
  }
}

std::int64_t RhythmClimb::step() {
  const bool is_start = next_start_ < starts_.size();
  Rhythm tried = is_start ? starts_[next_start_++] : rhythm_;
  if (!is_start && current_ < kNever) {
    do {
      change(tried);
    } while (dice_.below(2) == 0);
  }
  const double makespan = is_start || current_ < kNever ? time(tried) : kNever;
  if (makespan < current_ || (!is_start && makespan <= current_)) {
    current_ = makespan;
    rhythm_ = std::move(tried);
  }
  return judge_.timing_effort();
}

double RhythmClimb::time(const Rhythm& rhythm) {
  for (Sequence& order : orders_) order.clear();
  for (std::int32_t stage = 0; stage < problem_.cost.stages(); ++stage) {
    Sequence& order = orders_[at(problem_.placement[at(stage)])];
    std::int32_t forwards = 0;
    const auto forward = [&] {
      order.push_back(code_of(stage, Kind::F));
      ++forwards;
    };
    while (forwards < std::min(rhythm.warm_up[at(stage)], problem_.microbatches)) forward();
    for (std::int32_t input_grads = 0; input_grads < problem_.microbatches; ++input_grads) {
      order.push_back(code_of(stage, Kind::I));
      if (forwards < problem_.microbatches && forwards - input_grads <= rhythm.steady[at(stage)]) forward();
    }
  }
  const double makespan = timer_.fill(orders_, rhythm.patience, current_ + kTolerance);
  return makespan < kNever && judge_.keep(timer_.filled(), makespan) ? makespan : kNever;
}

// Turns one knob on a run of neighbouring stages.
void RhythmClimb::change(Rhythm& rhythm) {
  const std::int32_t stages = problem_.cost.stages();
  const std::int32_t first = dice_.below(stages), last = std::min(stages - 1, first + dice_.heads(stages));
  const auto knob = static_cast<Knob>(dice_.below(3));
  const std::int32_t by = (dice_.below(2) == 0 ? 1 : -1) * (1 + dice_.below(2));
  const float patience = 0.25F * static_cast<float>(dice_.below(6));
  for (std::int32_t stage = first; stage <= last; ++stage) {
    const std::size_t s = at(stage);
    switch (knob) {
      case Knob::WarmUp: rhythm.warm_up[s] = std::clamp(rhythm.warm_up[s] + by, 1, most_[s]); break;
      case Knob::Steady: rhythm.steady[s] = std::clamp(rhythm.steady[s] + by, 1, most_[s]); break;
      case Knob::Patience: rhythm.patience[s] = patience; break;
    }
  }
}

}  // namespace adaptra::schedule
