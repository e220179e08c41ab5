// Local search over the sequences themselves: ops of one rank change places, most of them on the critical path.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "schedule/dice.h"
#include "schedule/quick_timer.h"
#include "schedule/types.h"

namespace adaptra::schedule {

// Keeps sequences executable and within limits while ops move in them.
class Limits {
 public:
  // `in_flight` is the most microbatches in flight per stage.
  Limits(const Problem& problem, const std::vector<std::int32_t>& in_flight);

  // Rewrites one rank's sequence so that every I follows its F, every W its I, and memory suffices: a W that comes too early
  // waits for its I, and one that frees memory a forward needs comes before it. False when no W can help.
  [[nodiscard]] bool repair(std::size_t rank, Sequence& sequence);

 private:
  struct Counts {
    std::int32_t forwards, input_grads, weight_grads;
    std::int32_t early, late;  // W ahead of their place, and W that wait for their I
  };

  bool run_weight_grad(std::size_t rank, double& held);

  const Problem& problem_;
  const std::vector<std::int32_t>& in_flight_;
  std::vector<std::vector<std::int32_t>> stages_;  // per rank
  std::vector<double> limit_;                      // per rank
  std::vector<Counts> counts_;
  Sequence repaired_;
};

// Late acceptance (Burke and Bykov 2017): a change stays when the step does not get longer than it is or than it was some
// changes ago. Requires sequences within the limits.
class LocalSearch {
 public:
  LocalSearch(const Problem& problem, const Rule& rule, const std::vector<std::int32_t>& in_flight, std::vector<Sequence> start,
              Dice& dice);

  [[nodiscard]] double best_makespan() const { return best_makespan_; }
  [[nodiscard]] const std::vector<Sequence>& best() const { return best_; }

  // Tries one change.
  void step();

 private:
  struct Undo {
    std::size_t rank;
    Sequence sequence;
  };

  double time(double cutoff);
  void find_blocks();
  void restart();
  bool move_one();
  bool move_several(std::size_t rank, std::int32_t code, std::int32_t microbatch, std::int32_t by);
  bool move_op(std::size_t rank, std::size_t from, std::size_t to);
  void undo();

  const Problem& problem_;
  const Rule& rule_;
  Limits limits_;
  const bool quick_;
  QuickTimer timer_;
  Dice& dice_;
  std::vector<Sequence> current_, best_;
  double current_makespan_, best_makespan_;
  std::vector<Block> blocks_;
  std::vector<double> history_;
  std::size_t steps_ = 0, fruitless_ = 0;
  std::vector<Undo> undo_;
  std::size_t undo_count_ = 0;
};

}  // namespace adaptra::schedule
