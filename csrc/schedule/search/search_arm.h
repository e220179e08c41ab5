// An arm of the search: one way to look for a plan. Arms take turns, see search_orders.cc.
#pragma once

#include <cstdint>

namespace adaptra::schedule {

class SearchArm {
 public:
  virtual ~SearchArm() = default;

  // Begins a turn, as the best plan may have come from another arm meanwhile. Returns the makespan that the turn has to better.
  virtual double begin_turn() { return value(); }

  // Tries one change. Returns its effort, which may differ from step to step. The evaluator keeps the best plan.
  virtual std::int64_t step() = 0;

  // The shortest makespan that this arm itself has found, which another arm may have bettered.
  [[nodiscard]] virtual double value() const = 0;

 protected:
  SearchArm() = default;
  SearchArm(const SearchArm&) = default;
  SearchArm& operator=(const SearchArm&) = default;
};

}  // namespace adaptra::schedule
