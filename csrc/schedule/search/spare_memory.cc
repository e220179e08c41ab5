#include "schedule/search/spare_memory.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <utility>

#include "schedule/bounds/fit_memory.h"
#include "schedule/evaluate/evaluator.h"
#include "schedule/simulate/constants.h"
#include "schedule/simulate/sequence.h"
#include "schedule/simulate/simulator.h"

namespace adaptra::schedule {
namespace {

// Lowering ends once a limit that works and one that does not differ by this part of the former.
constexpr double kPrecision = 1e-3;

class SpareMemory {
 public:
  SpareMemory(const Problem& problem, const std::vector<Order>& orders, double at_most, std::int64_t effort, std::int32_t steps)
      : problem_(problem),
        steps_(steps),
        evaluator_(problem, std::vector<std::int32_t>(problem.placement.size(), problem.microbatches)),
        at_most_(at_most),
        left_(effort),
        sequences_(to_sequences(orders)),
        least_(at(problem.workers), 0.0),
        fit_(problem),
        simulator_(problem, steps) {
    for (std::size_t s = 0; s < problem.placement.size(); ++s)
      least_[at(problem.placement[s])] += problem.cost.memory_forward[s];
    for (const Sequence& sequence : sequences_) peaks_.push_back(peak(sequence));
  }

  std::vector<Order> run() {
    std::vector<std::size_t> all(peaks_.size());
    std::iota(all.begin(), all.end(), 0U);
    lower(all);
    for (std::vector<double> before; before != peaks_ && left_ > 0;) {
      before = peaks_;
      for (const std::size_t rank : all)
        if (take({rank}, (1.0 - kPrecision) * peaks_[rank])) lower({rank});
    }
    return to_orders(sequences_, problem_.stages);
  }

 private:
  // Lowers the most that any of these ranks holds, as far as bisection finds.
  void lower(const std::vector<std::size_t>& ranks) {
    double refused = 0.0;
    for (const std::size_t rank : ranks) refused = std::max(refused, least_[rank]);
    refused -= kTolerance * (1.0 + refused);
    for (double limit = refused + kTolerance * (1.0 + refused); left_ > 0;) {
      if (!take(ranks, limit)) refused = limit;
      const double most = most_held(ranks);
      if (most - refused <= kPrecision * most) break;
      limit = 0.5 * (most + refused);
    }
  }

  [[nodiscard]] double most_held(const std::vector<std::size_t>& ranks) const {
    double most = 0.0;
    for (const std::size_t rank : ranks) most = std::max(most, peaks_[rank]);
    return most;
  }

  // Makes these ranks hold at most `limit`. False, without a change, if that can't be or takes too long.
  bool take(const std::vector<std::size_t>& ranks, double limit) {
    for (const bool weight_grads_first : {false, true}) {
      std::vector<Sequence> tried = sequences_;
      const bool fits = std::all_of(ranks.begin(), ranks.end(), [&](std::size_t rank) {
        return peaks_[rank] <= limit || fit_.fit(sequences_[rank], limit, weight_grads_first, tried[rank]);
      });
      if (!fits) continue;
      if (time(tried) > at_most_) continue;
      sequences_ = std::move(tried);
      for (const std::size_t rank : ranks) peaks_[rank] = peak(sequences_[rank]);
      return true;
    }
    return false;
  }

  // The time that must be at most `at_most`, or more than that if it is.
  double time(const std::vector<Sequence>& sequences) {
    if (steps_ == 1) {
      left_ -= evaluator_.timing_effort();
      return evaluator_.time(sequences, at_most_);
    }
    const std::vector<Order> orders = to_orders(sequences, problem_.stages);
    for (const Order& order : orders) left_ -= static_cast<std::int64_t>(order.size()) * steps_;
    const Simulated found = simulator_.run(orders);
    return found.complete ? found.period : kNever;
  }

  [[nodiscard]] double peak(const Sequence& sequence) const {
    double held = 0.0, most = 0.0;
    for (const std::int32_t code : sequence) {
      const std::size_t s = at(stage_of(code));
      switch (kind_of(code)) {
        case Kind::F: held += problem_.cost.memory_forward[s]; break;
        case Kind::I: held -= problem_.cost.memory_input_grad[s]; break;
        default: held -= problem_.cost.memory_forward[s] - problem_.cost.memory_input_grad[s]; break;
      }
      most = std::max(most, held);
    }
    return most;
  }

  const Problem& problem_;
  const std::int32_t steps_;
  Evaluator evaluator_;
  const double at_most_;
  std::int64_t left_;
  std::vector<Sequence> sequences_;
  std::vector<double> least_;  // per rank, the memory of one microbatch
  std::vector<double> peaks_;  // per rank
  FitMemory fit_;
  Simulator simulator_;
};

}  // namespace

std::vector<Order> spare_memory(const Problem& problem, const std::vector<Order>& orders, double at_most, std::int64_t effort,
                                std::int32_t steps) {
  return SpareMemory(problem, orders, at_most, effort, steps).run();
}

}  // namespace adaptra::schedule
