// Hill climbing over parameters from which orders are made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "schedule/search/rng.h"
#include "schedule/search/search_arm.h"
#include "schedule/simulate/constants.h"

namespace adaptra::schedule {

// Tries every start, then changes the best parameters at random and keeps what is not worse. `Parameters` is copied at each
// step. A subclass says how long a step takes with given parameters, and how they change.
template <typename Parameters>
class HillClimb : public SearchArm {
 public:
  [[nodiscard]] bool has_starts() const { return next_start_ < starts_.size(); }

  std::int64_t step() final {
    const bool is_start = has_starts();
    if (!is_start && makespan_ == kNever) return effort_;  // no start led to a plan, so nothing near one will
    Parameters tried = is_start ? starts_[next_start_++] : best_;
    if (!is_start) {
      do {
        change(tried);
      } while (rng_.below(2) == 0);
    }
    const double makespan = time(tried, makespan_);
    if (makespan < makespan_ || (!is_start && makespan <= makespan_)) {
      makespan_ = makespan;
      best_ = std::move(tried);
    }
    return effort_;
  }

  [[nodiscard]] double value() const final { return makespan_; }

 protected:
  // `effort` is what one step costs.
  HillClimb(std::int64_t effort, Rng& rng) : rng_(rng), effort_(effort) {}

  void add_start(Parameters start) { starts_.push_back(std::move(start)); }

  Rng& rng_;

 private:
  // The makespan of the orders made from `parameters`; infinity where there are none, or where they take longer than `at_most`.
  virtual double time(const Parameters& parameters, double at_most) = 0;
  virtual void change(Parameters& parameters) = 0;

  const std::int64_t effort_;
  std::vector<Parameters> starts_;
  std::size_t next_start_ = 0;
  Parameters best_;
  double makespan_ = kNever;
};

}  // namespace adaptra::schedule
