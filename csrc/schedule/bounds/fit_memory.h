// Makes a rank's order hold less memory: forwards later, weight gradients sooner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "schedule/simulate/problem.h"
#include "schedule/simulate/sequence.h"

namespace adaptra::schedule {

class FitMemory {
 public:
  explicit FitMemory(const Problem& problem) : problem_(problem), counts_(problem.placement.size()) {}

  // Rewrites a rank's sequence so that it holds at most `limit`. A forward without room waits until there is room, or until its
  // I needs it. With `weight_grads_first`, W make room before a forward waits; else only for a forward that its I needs. False
  // when nothing can make room; `fitted` is meaningless then.
  [[nodiscard]] bool fit(const Sequence& sequence, double limit, bool weight_grads_first, Sequence& fitted);

 private:
  struct Counts {
    std::int32_t forwards, input_grads, weight_grads;
    std::int32_t early;  // W ahead of their place
  };

  [[nodiscard]] bool has_room(std::int32_t stage) const;
  void run_forward(std::int32_t stage, Sequence& fitted);
  void run_waiting(Sequence& fitted);
  bool run_weight_grad(Sequence& fitted);

  const Problem& problem_;
  std::vector<Counts> counts_;  // per stage
  std::int32_t rank_ = 0;
  double limit_ = 0.0, held_ = 0.0;
  std::vector<std::int32_t> waiting_;  // stages whose forwards were put off, from `next_` on
  std::size_t next_ = 0;
};

}  // namespace adaptra::schedule
