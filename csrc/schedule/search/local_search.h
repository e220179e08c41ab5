// Local search over the sequences themselves: ops of one rank change places, most of them on the critical path.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "schedule/bounds/limits.h"
#include "schedule/evaluate/evaluator.h"
#include "schedule/evaluate/fast_simulator.h"
#include "schedule/search/rng.h"
#include "schedule/search/search_arm.h"
#include "schedule/simulate/problem.h"

namespace adaptra::schedule {

// How a local search treats W. Placed: it moves them as it moves other ops, which the best plans need. Filled: they fill the
// gaps that F and I leave, which reaches a good plan sooner.
enum class WeightGrads : std::uint8_t { Placed, Filled };

// Late acceptance (Burke and Bykov 2017): a change stays when the step is no longer than it is, or than it was some changes
// ago. WeightGrads::Filled requires FastSimulator::fills(problem).
class LocalSearch final : public SearchArm {
 public:
  LocalSearch(const Problem& problem, const std::vector<std::int32_t>& in_flight, WeightGrads weight_grads,
              Evaluator& evaluator, Rng& rng);

  // Starts again from the evaluator's best orders if they are not this search's own.
  double begin_turn() override;
  std::int64_t step() override;
  [[nodiscard]] double value() const override { return best_makespan_; }

 private:
  struct Undo {
    std::size_t rank;
    Sequence sequence;
  };

  double time(double cutoff);
  void find_blocks();
  void find_filled_blocks();
  void set_first_patience();
  void keep_current();
  void keep_best();
  bool change();
  void change_patience();
  void restart();
  void start_from_current();
  bool move_one();
  bool move_several(std::size_t rank, std::int32_t code, std::int32_t microbatch, std::int32_t by);
  bool move_op(std::size_t rank, std::size_t from, std::size_t to);
  void undo();

  const Problem& problem_;
  Limits limits_;
  const bool is_covered_, filled_;
  FastSimulator simulator_;
  Evaluator& evaluator_;
  Rng& rng_;
  std::vector<Sequence> current_, best_;         // of F and I alone where W are filled in
  std::vector<float> patience_, best_patience_;  // per stage, where W are filled in
  std::vector<Sequence> whole_;                  // the current ones with W filled in
  double current_makespan_ = 0.0, best_makespan_ = std::numeric_limits<double>::infinity();
  double started_from_ = std::numeric_limits<double>::infinity();  // the evaluator's best makespan at that time
  std::vector<Block> blocks_;
  std::vector<double> history_;
  std::size_t steps_ = 0, fruitless_ = 0;
  std::vector<Undo> undo_;
  std::size_t undo_count_ = 0;
  double since_ = 0.0;                // this step changes nothing before that time
  std::vector<float> undo_patience_;  // the patience before this step, if the step changed it
};

}  // namespace adaptra::schedule
