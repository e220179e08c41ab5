// One of the ways in which a plan is searched; they take turns, see search_orders.cc.
#pragma once

#include <cstdint>

namespace adaptra::schedule {

class SearchArm {
 public:
  virtual ~SearchArm() = default;

  // Called before a turn, as the best plan may have come from another part meanwhile. What the turn has to better.
  virtual double begin_turn() { return value(); }

  // Tries one thing, which may cost more effort than another; how much. The evaluator keeps what is best.
  virtual std::int64_t step() = 0;

  // How far the part itself has come, which need not be as far as another.
  [[nodiscard]] virtual double value() const = 0;

 protected:
  SearchArm() = default;
  SearchArm(const SearchArm&) = default;
  SearchArm& operator=(const SearchArm&) = default;
};

}  // namespace adaptra::schedule
