// Hill climbing over list-scheduling policies.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "schedule/evaluate/evaluator.h"
#include "schedule/search/list_schedule.h"
#include "schedule/search/rng.h"
#include "schedule/search/search_arm.h"

namespace adaptra::schedule {

class PolicyClimb final : public SearchArm {
 public:
  // `warm_ups` are where to start, one number per stage; `most` is how many microbatches each stage may have in flight.
  PolicyClimb(const Problem& problem, const std::vector<std::vector<std::int32_t>>& warm_ups,
              const std::vector<std::int32_t>& most, Evaluator& evaluator, Rng& rng);

  [[nodiscard]] bool has_starts() const { return next_start_ < starts_.size(); }

  std::int64_t step() override;
  [[nodiscard]] double value() const override { return current_; }

 private:
  void change(Policy& policy);

  const Problem& problem_;
  const std::vector<std::int32_t>& most_;
  Evaluator& evaluator_;
  Rng& rng_;
  ListScheduler scheduler_;
  std::vector<Policy> starts_;
  std::size_t next_start_ = 0;
  Policy policy_;
  double current_ = std::numeric_limits<double>::infinity();
};

}  // namespace adaptra::schedule
