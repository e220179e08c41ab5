// The state that both simulators keep: which inputs are there, how far each rank is, and the result so far.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/simulate/constants.h"
#include "schedule/simulate/rule.h"
#include "schedule/simulate/simulate.h"

namespace adaptra::schedule {

class SimulationState {
 public:
  SimulationState(const Problem& problem, const std::vector<Order>& orders, const Rule& rule, Detail detail);

 protected:
  // The time since which all inputs of `op` are there; negative while one is missing.
  [[nodiscard]] double inputs_there(const Op& op) const {
    double there = 0.0;
    for (const std::size_t column : rule_.needs[static_cast<std::size_t>(op.kind)]) {
      const std::int32_t producer = op.stage + rule_.columns[column].offset;
      if (producer < 0 || producer >= stages_) continue;
      const double since = available_[slot(op.stage, op.microbatch, column)];
      if (since < 0.0) return since;
      if (since > there) there = since;
    }
    return there;
  }

  // Calls send(consumer stage, column) for every message that `op` sends, and makes its output known on its own stage.
  template <typename Send>
  void publish(const Op& op, double end, Send send) {
    for (const std::size_t column : rule_.meets[static_cast<std::size_t>(op.kind)]) {
      const std::int32_t consumer = op.stage - rule_.columns[column].offset;
      if (consumer < 0 || consumer >= stages_) continue;
      if (consumer == op.stage) {
        make_available(consumer, op.microbatch, column, end);
      } else {
        send(consumer, column);
      }
    }
  }

  void make_available(std::int32_t stage, std::int32_t microbatch, std::size_t column, double since) {
    available_[slot(stage, microbatch, column)] = since;
  }

  // Records that a rank ran its next op.
  void record(std::int32_t rank, double start, double end);

  // Fills in the makespan. False when some rank has not run its whole order.
  [[nodiscard]] bool finish();

  const Problem& problem_;
  const std::vector<Order>& orders_;
  const CompiledRule rule_;
  const bool times_wanted_;
  const std::int32_t stages_;
  std::vector<std::size_t> position_;  // per rank, how many ops it has run
  Result result_;

 private:
  [[nodiscard]] std::size_t slot(std::int32_t stage, std::int32_t microbatch, std::size_t column) const {
    return (at(stage) * microbatches_ + at(microbatch)) * rule_.columns.size() + column;
  }

  std::size_t microbatches_;
  std::vector<double> available_;  // per stage, microbatch and column; negative: not there yet
};

// Simulates in time order, in any mode of communication. `simulate` chooses it when edges are shared or communication blocks.
[[nodiscard]] Result simulate_events(const Problem& problem, const std::vector<Order>& orders, const Rule& rule, Detail detail);

}  // namespace adaptra::schedule
