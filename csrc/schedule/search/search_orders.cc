#include "schedule/search/search_orders.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <utility>

#include "schedule/bounds/bounds.h"
#include "schedule/bounds/fit_memory.h"
#include "schedule/evaluate/evaluator.h"
#include "schedule/search/local_search.h"
#include "schedule/search/policy_climb.h"
#include "schedule/search/rng.h"
#include "schedule/search/steady_state_climb.h"
#include "schedule/simulate/constants.h"

namespace adaptra::schedule {
namespace {

// Makes the orders of an Alternation. Each stage runs its warm-up forwards, then in turn I, the W that is `deferred`
// microbatches older, and one forward.
std::vector<Sequence> alternating_sequences(const Problem& problem, const Alternation& alternation) {
  std::vector<Sequence> sequences(at(problem.workers));
  const std::int32_t microbatches = problem.microbatches;
  for (std::int32_t stage = 0; stage < problem.stages; ++stage) {
    Sequence& sequence = sequences[at(problem.placement[at(stage)])];
    std::int32_t forwards = std::min(alternation.warm_up[at(stage)], microbatches), weight_grads = 0;
    sequence.assign(at(forwards), code_of(stage, Kind::F));
    for (std::int32_t microbatch = 0; microbatch < microbatches; ++microbatch) {
      sequence.push_back(code_of(stage, Kind::I));
      if (microbatch >= alternation.deferred[at(stage)]) {
        sequence.push_back(code_of(stage, Kind::W));
        ++weight_grads;
      }
      if (forwards < microbatches) {
        sequence.push_back(code_of(stage, Kind::F));
        ++forwards;
      }
    }
    sequence.insert(sequence.end(), at(microbatches - weight_grads), code_of(stage, Kind::W));
  }
  return sequences;
}

// The most microbatches that each stage may have in flight, by the caller's limits and by memory.
std::vector<std::int32_t> most_in_flight(const Problem& problem, const std::vector<std::int32_t>& in_flight) {
  std::vector<std::int32_t> most;
  for (std::size_t stage = 0; stage < in_flight.size(); ++stage) {
    std::int32_t count = std::min(in_flight[stage], problem.microbatches);
    const double held = problem.cost.memory_forward[stage];
    if (!problem.cost.memory_limit.empty() && held > 0.0) {
      const double limit = problem.cost.memory_limit[at(problem.placement[stage])];
      count = std::min(count, static_cast<std::int32_t>(std::floor(std::min(limit / held + kTolerance, 1e9))));
    }
    most.push_back(std::max(count, 1));
  }
  return most;
}

// One arm of the search, and the effort that it gets.
struct ArmBudget {
  std::unique_ptr<SearchArm> arm;
  double share;          // of the effort while no arm gains anything
  double rate = kNever;  // makespan gained per effort in its last turn
  double spent = 0.0;
  double turn = 0.0;
};

// The first turn is as long as dispatching kFirstTurn policies. A turn that gains nothing makes the next one kGrowth times as
// long. Measured on random cases of 4 to 16 stages, where neither number matters much.
constexpr double kFirstTurn = 6.0;
constexpr double kGrowth = 1.25;

class Search {
 public:
  Search(const Problem& problem, const SearchOptions& options)
      : problem_(problem),
        options_(options),
        most_(most_in_flight(problem, options.in_flight)),
        rng_(options.seed),
        evaluator_(problem, options.in_flight) {}

  std::optional<Plan> run() {
    auto policies = std::make_unique<PolicyClimb>(problem_, options_.warm_ups, most_, evaluator_, rng_);
    spent_ += policies->step();
    consider_start();
    for (const Alternation& alternation : options_.alternations)
      evaluator_.consider(alternating_sequences(problem_, alternation));
    while (policies->has_starts() && (evaluator_.best_makespan() == kNever || !done())) spent_ += policies->step();
    if (evaluator_.best_makespan() == kNever) return std::nullopt;
    if (!done()) add_arms(std::move(policies));
    while (!done()) take_turn(next());
    return Plan{evaluator_.best_makespan(), to_orders(evaluator_.best(), problem_.stages)};
  }

 private:
  // Whether to end: the plan meets the bound, the effort is spent, or the caller wants no more.
  bool done() {
    if (spent_ >= options_.effort || options_.stop()) return true;
    if (target_ < 0.0) target_ = lower_bound(problem_).value;
    return evaluator_.best_makespan() <= std::max(target_ * (1.0 + kTolerance), options_.enough);
  }

  // Tries the caller's start, with forwards put off and weight gradients brought forward as far as memory requires.
  void consider_start() {
    FitMemory fit(problem_);
    const std::vector<Sequence> start = to_sequences(options_.start);
    for (const bool weight_grads_first : {false, true}) {
      std::vector<Sequence> fitted = start;
      bool fits = !start.empty();
      for (std::size_t rank = 0; rank < start.size() && fits && !problem_.cost.memory_limit.empty(); ++rank)
        fits = fit.fit(start[rank], problem_.cost.memory_limit[rank], weight_grads_first, fitted[rank]);
      if (fits) evaluator_.consider(fitted);
    }
  }

  // Makes the arms, but not before there is a plan: on large problems that takes as long as finding the first.
  void add_arms(std::unique_ptr<PolicyClimb> policies) {
    const auto local_search = [&](WeightGrads weight_grads) {
      return std::make_unique<LocalSearch>(problem_, options_.in_flight, weight_grads, evaluator_, rng_);
    };
    const bool fills = FastSimulator::fills(problem_);
    if (fills) {
      add(0.25, std::make_unique<SteadyStateClimb>(problem_, options_.warm_ups, most_, evaluator_, rng_));
      add(2.0, local_search(WeightGrads::Filled));
    }
    add(0.5, std::move(policies));
    // With W filled in, moving them too keeps only one change in 150: this arm is for when no other gains anything.
    add(fills ? 0.1 : 2.0, local_search(WeightGrads::Placed));
  }

  void add(double share, std::unique_ptr<SearchArm> arm) {
    arms_.push_back({std::move(arm), share});
    arms_.back().turn = kFirstTurn * static_cast<double>(evaluator_.dispatch_effort());
  }

  // Chooses the arm that gained most in its last turn; when none gained, the one that has had the least of its share.
  ArmBudget& next() {
    const auto before = [](const ArmBudget& a, const ArmBudget& b) {
      return a.rate != b.rate ? a.rate > b.rate : a.spent / a.share < b.spent / b.share;
    };
    return *std::min_element(arms_.begin(), arms_.end(), before);
  }

  void take_turn(ArmBudget& budget) {
    double before = budget.arm->begin_turn();
    if (before == kNever) before = evaluator_.best_makespan();
    double used = 0.0;
    while (used < budget.turn && !done()) {
      const std::int64_t effort = budget.arm->step();
      used += static_cast<double>(effort);
      spent_ += effort;
    }
    if (used == 0.0) return;
    budget.spent += used;
    budget.rate = std::max(0.0, before - budget.arm->value()) / used;
    if (budget.rate == 0.0) budget.turn *= kGrowth;
  }

  const Problem& problem_;
  const SearchOptions& options_;
  const std::vector<std::int32_t> most_;
  Rng rng_;
  Evaluator evaluator_;
  std::vector<ArmBudget> arms_;
  std::int64_t spent_ = 0;
  double target_ = -1.0;  // the bound, once it is needed: on large problems it takes as long as a plan
};

}  // namespace

std::optional<Plan> search_orders(const Problem& problem, const SearchOptions& options) {
  return Search(problem, options).run();
}

}  // namespace adaptra::schedule
