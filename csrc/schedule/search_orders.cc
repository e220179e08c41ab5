#include "schedule/search_orders.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>

#include "schedule/bounds.h"
#include "schedule/dice.h"
#include "schedule/list_schedule.h"
#include "schedule/local_search.h"
#include "schedule/quick_timer.h"

namespace adaptra::schedule {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kTolerance = 1e-9;

std::size_t at(std::int32_t index) { return static_cast<std::size_t>(index); }

// What one step of the search turns. The backlog is drawn half as often as the rest: measured, that finds shorter plans.
enum class Knob : std::uint8_t { WarmUp, InFlight, PatienceWeight, PatienceForward, Backlog };
constexpr std::array<Knob, 9> kKnobs = {Knob::WarmUp,          Knob::WarmUp,          Knob::InFlight,
                                        Knob::InFlight,        Knob::PatienceWeight,  Knob::PatienceWeight,
                                        Knob::PatienceForward, Knob::PatienceForward, Knob::Backlog};

// Every stage by itself: its warm-up forwards, then in turn I, the W that is `deferred` older, and one forward.
std::vector<Order> alternating_orders(const Problem& problem, const Alternation& alternation) {
  std::vector<Order> orders(at(problem.ranks));
  const std::int32_t microbatches = problem.microbatches;
  for (std::int32_t stage = 0; stage < problem.cost.stages(); ++stage) {
    Order& order = orders[at(problem.placement[at(stage)])];
    std::int32_t forwards = 0, weight_grads = 0;
    while (forwards < std::min(alternation.warm_up[at(stage)], microbatches)) order.push_back({stage, Kind::F, forwards++});
    for (std::int32_t microbatch = 0; microbatch < microbatches; ++microbatch) {
      order.push_back({stage, Kind::I, microbatch});
      if (microbatch >= alternation.deferred[at(stage)]) order.push_back({stage, Kind::W, weight_grads++});
      if (forwards < microbatches) order.push_back({stage, Kind::F, forwards++});
    }
    while (weight_grads < microbatches) order.push_back({stage, Kind::W, weight_grads++});
  }
  return orders;
}

// What one evaluation costs in units of effort, per op: a dispatched policy, and a step of the local search. Measured.
constexpr std::int64_t kDispatchEffort = 2;
constexpr std::int64_t kLocalEffort = 6;  // this many ops for one unit

class Search {
 public:
  Search(const Problem& problem, const Rule& rule, const SearchOptions& options)
      : problem_(problem),
        rule_(rule),
        options_(options),
        stages_(problem.cost.stages()),
        quick_(QuickTimer::covers(problem)),
        timer_(problem),
        dice_(options.seed) {
    ops_ = static_cast<std::int64_t>(3) * stages_ * problem.microbatches;
    for (std::int32_t stage = 0; stage < stages_; ++stage) {
      std::int32_t most = std::min(options.in_flight[at(stage)], problem.microbatches);
      const double held = problem.cost.memory_forward[at(stage)];
      if (!problem.cost.memory_limit.empty() && held > 0.0) {
        const double limit = problem.cost.memory_limit[at(problem.placement[at(stage)])];
        most = std::min(most, static_cast<std::int32_t>(std::floor(std::min(limit / held + kTolerance, 1e9))));
      }
      most_.push_back(std::max(most, 1));
    }
  }

  std::optional<Plan> run() {
    for (const auto& warm_up : options_.warm_ups) try_start(warm_up);
    for (const Alternation& alternation : options_.alternations) judge(alternating_orders(problem_, alternation));
    // Policies reach far, local search reaches the last percent: they take turns, each turn longer than the one before.
    for (std::int64_t turn = std::max<std::int64_t>(kFirstTurn, 20 * kDispatchEffort * ops_); !done(); turn *= 2) {
      climb(spent_ + turn);
      improve(spent_ + 3 * turn);
    }
    return std::move(best_);
  }

 private:
  static constexpr std::int64_t kFirstTurn = 8'000;

  // Once there is a plan: whether it meets the bound, the effort is spent, or the caller wants no more.
  bool done() {
    if (spent_ >= options_.effort || !best_) return spent_ >= options_.effort;
    if (options_.stop()) return true;
    if (target_ < 0.0) target_ = lower_bound(problem_).value;
    return best_->makespan <= target_ * (1.0 + kTolerance);
  }

  // The makespan of what the policy leads to, or infinity when that is longer than `cutoff` or not within the limits.
  double evaluate(const Policy& policy, double cutoff) {
    spent_ += kDispatchEffort * ops_;
    std::optional<std::vector<Order>> orders = list_schedule(problem_, policy, cutoff);
    return orders ? judge(std::move(*orders)) : kNever;
  }

  // The exact makespan of orders, or infinity when ranks can't execute them within the limits; keeps the best.
  double judge(std::vector<Order> orders) {
    const double makespan = quick_ ? timer_.makespan(to_sequences(orders), kNever) : simulated(orders);
    if (makespan == kNever || !within_limits(orders)) return kNever;
    if (!best_ || makespan < best_->makespan) best_ = Plan{makespan, std::move(orders)};
    return makespan;
  }

  double simulated(const std::vector<Order>& orders) const {
    const Result result = simulate(problem_, orders, rule_);
    return result.complete ? result.makespan : kNever;
  }

  bool within_limits(const std::vector<Order>& orders) const {
    const Peaks peak = peaks(problem_, orders);
    for (std::int32_t stage = 0; stage < stages_; ++stage) {
      if (peak.in_flight[at(stage)] > options_.in_flight[at(stage)]) return false;
    }
    const std::vector<double>& limit = problem_.cost.memory_limit;
    for (std::size_t rank = 0; rank < limit.size(); ++rank) {
      if (peak.memory[rank] > limit[rank] + kTolerance) return false;
    }
    return true;
  }

  void consider(const Policy& policy) {
    if (done()) return;
    const double makespan = evaluate(policy, current_ + kTolerance);
    if (makespan < current_) {
      current_ = makespan;
      policy_ = policy;
    }
  }

  // Local search from the best orders, or on from where it was if that is where the best ones came from.
  void improve(std::int64_t until) {
    if (!best_ || done()) return;
    if (!local_ || local_->best_makespan() > best_->makespan)
      local_.emplace(problem_, rule_, options_.in_flight, to_sequences(best_->orders), dice_);
    const double before = best_->makespan;
    while (spent_ < until && !done()) {
      local_->step();
      spent_ += quick_ ? 1 + ops_ / kLocalEffort : kDispatchEffort * ops_;
      best_->makespan = std::min(best_->makespan, local_->best_makespan());
    }
    if (best_->makespan < before) best_->orders = to_orders(local_->best(), stages_);
  }

  void try_start(const std::vector<std::int32_t>& warm_up) {
    for (const float patience : {0.0F, 1.0F, 0.5F}) {
      for (const bool bounded : {true, false}) {
        Policy policy;
        for (std::int32_t stage = 0; stage < stages_; ++stage) {
          const std::int32_t most = most_[at(stage)];
          const std::int32_t quota = std::clamp(warm_up[at(stage)], 1, most);
          policy.stages.push_back(
              {quota, bounded ? quota : most, patience, patience == 1.0F ? 0.5F : 0.0F, problem_.microbatches});
        }
        consider(policy);
      }
    }
  }

  void climb(std::int64_t until) {
    if (policy_.stages.empty()) return;
    while (spent_ < until && !done()) {
      Policy changed = policy_;
      do {
        change(changed);
      } while (dice_.below(2) == 0);
      const double makespan = evaluate(changed, current_ + kTolerance);
      if (makespan <= current_) {
        current_ = makespan;
        policy_ = std::move(changed);
      }
    }
  }

  void change(Policy& policy) {
    if (problem_.ranks < stages_ && dice_.below(8) == 0) policy.deep_first = !policy.deep_first;
    std::int32_t first = dice_.below(stages_), last = first;
    if (dice_.below(2) == 0) last = dice_.below(stages_);
    if (first > last) std::swap(first, last);
    const Knob knob = kKnobs[at(dice_.below(static_cast<std::int32_t>(kKnobs.size())))];
    const std::int32_t by = (dice_.below(2) == 0 ? 1 : -1) * (1 + dice_.below(2));
    const float patience = 0.25F * static_cast<float>(dice_.below(5));
    for (std::int32_t stage = first; stage <= last; ++stage) {
      StagePolicy& mine = policy.stages[at(stage)];
      const std::int32_t most = most_[at(stage)];
      switch (knob) {
        case Knob::WarmUp: mine.warm_up = std::clamp(mine.warm_up + by, 1, most); break;
        case Knob::InFlight: mine.in_flight = std::clamp(mine.in_flight + by, 1, most); break;
        case Knob::PatienceWeight: mine.patience_weight = patience; break;
        case Knob::PatienceForward: mine.patience_forward = patience; break;
        case Knob::Backlog: mine.backlog = std::clamp(std::min(mine.backlog, most) + by, 0, most); break;
      }
    }
  }

  const Problem& problem_;
  const Rule& rule_;
  const SearchOptions& options_;
  const std::int32_t stages_;
  const bool quick_;
  QuickTimer timer_;
  std::int64_t ops_ = 0, spent_ = 0;
  std::vector<std::int32_t> most_;
  Policy policy_;
  double current_ = kNever;
  std::optional<Plan> best_;
  double target_ = -1.0;  // the bound, once it is needed: on large problems it takes as long as a plan
  std::optional<LocalSearch> local_;
  Dice dice_;
};

}  // namespace

std::optional<Plan> search_orders(const Problem& problem, const Rule& rule, const SearchOptions& options) {
  return Search(problem, rule, options).run();
}

}  // namespace adaptra::schedule
