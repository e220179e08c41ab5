// Hill climbing over list-scheduling policies.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/evaluate/evaluator.h"
#include "schedule/search/hill_climb.h"
#include "schedule/search/list_schedule.h"
#include "schedule/search/rng.h"

namespace adaptra::schedule {

class PolicyClimb final : public HillClimb<Policy> {
 public:
  // `warm_ups` are the starts, one number per stage; `most` is how many microbatches each stage may have in flight.
  PolicyClimb(const Problem& problem, const std::vector<std::vector<std::int32_t>>& warm_ups,
              const std::vector<std::int32_t>& most, Evaluator& evaluator, Rng& rng);

 private:
  double time(const Policy& policy, double at_most) override;
  void change(Policy& policy) override;

  const Problem& problem_;
  const std::vector<std::int32_t>& most_;
  Evaluator& evaluator_;
  ListScheduler scheduler_;
};

}  // namespace adaptra::schedule
