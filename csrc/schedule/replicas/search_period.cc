#include "schedule/replicas/search_period.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "schedule/replicas/list_pass.h"
#include "schedule/replicas/network.h"
#include "schedule/search/rng.h"
#include "schedule/simulate/simulator.h"

namespace adaptra::schedule {
namespace {

constexpr std::int32_t kSteps = 8;  // as many as the period is stated for
constexpr std::int32_t kFewSteps = 2;
constexpr double kTolerance = 1e-12;  // relative, for sums that are added in another order

// Every worker's ops, each kind in microbatch order, then each Reduce, then each Step.
std::vector<Order> all_ops(const Problem& problem) {
  std::vector<Order> orders(static_cast<std::size_t>(problem.workers));
  for (const Kind kind : {Kind::F, Kind::I, Kind::W}) {
    for (std::int32_t replica = 0; replica < problem.replicas; ++replica) {
      for (std::int32_t stage = 0; stage < problem.stages; ++stage) {
        for (std::int32_t microbatch = 0; microbatch < problem.microbatches; ++microbatch) {
          const std::int32_t worker = problem.holder[problem.index(replica, stage, microbatch)];
          orders[static_cast<std::size_t>(worker)].push_back({replica, stage, kind, microbatch});
        }
      }
    }
  }
  for (const Kind kind : {Kind::Reduce, Kind::Step}) {
    for (std::size_t stage = 0; stage < problem.columns.size(); ++stage) {
      for (const std::int32_t worker : problem.columns[stage]) {
        orders[static_cast<std::size_t>(worker)].push_back(
            {problem.home[static_cast<std::size_t>(worker)], static_cast<std::int32_t>(stage), kind, 0});
      }
    }
  }
  return orders;
}

class Search {
 public:
  Search(const Problem& problem, const PeriodSearch& options)
      : problem_(problem),
        options_(options),
        ops_(all_ops(problem)),
        network_(problem, ops_),
        pass_(network_, options.room),
        simulator_(problem, kSteps),
        brief_(problem, kFewSteps),
        rng_(options.seed),
        no_release_(network_.workers(), 0.0) {
    for (const Order& order : ops_) flat_.insert(flat_.end(), order.begin(), order.end());
    double total = 0.0;
    for (const Node& node : network_.nodes) total += node.duration;
    mean_ = total / static_cast<double>(std::max<std::size_t>(network_.nodes.size(), 1));
  }

  std::optional<Plan> run() {
    if (!options_.start.empty()) {
      const std::vector<double> priority = starts_of(options_.start);
      for (const double patience : {1.0, 0.0}) {
        if (!priority.empty() && !ends()) descend(priority, patience);
      }
    }
    for (const double patience : {0.0, 1.0}) {
      for (const bool weights_first : {false, true}) {
        for (int own = 0; own < 4 && !ends(); ++own) descend(rule(own, weights_first), patience);
      }
    }
    while (!best_.empty() && !ends()) {
      std::vector<double> priority = best_starts_;
      const double noise = mean_ * std::exp2(static_cast<double>(rng_.below(7)) - 2.0);
      const double disturbed = std::exp2(-static_cast<double>(rng_.below(5)));
      for (double& one : priority) {
        if (rng_.unit() < disturbed) one += noise * (rng_.unit() - 0.5) * 2.0;
      }
      descend(priority, static_cast<double>(rng_.below(3)) / 2.0);
    }
    if (best_.empty()) return std::nullopt;
    return Plan{best_period_, orders_of(best_)};
  }

 private:
  // The orders of all workers' nodes, one worker after the other.
  [[nodiscard]] std::vector<Order> orders_of(const std::vector<std::int32_t>& sequence) const {
    std::vector<Order> orders(ops_.size());
    for (std::size_t worker = 0; worker < ops_.size(); ++worker) {
      orders[worker].reserve(ops_[worker].size());
      for (std::int32_t at = network_.first[worker]; at < network_.first[worker + 1]; ++at)
        orders[worker].push_back(flat_[static_cast<std::size_t>(sequence[static_cast<std::size_t>(at)])]);
    }
    return orders;
  }

  [[nodiscard]] bool ends() const {
    if (best_.empty()) return spent_ > 8 * options_.effort;
    return best_period_ <= options_.enough * (1.0 + kTolerance) || spent_ > options_.effort ||
           (options_.stop && options_.stop());
  }

  // Input gradients first, then forwards, then weight gradients, or the last two the other way round. Within a kind the least
  // microbatch goes first: ties by whether it is the worker's own replica's; or that before the microbatch, either way.
  [[nodiscard]] std::vector<double> rule(int own, bool weights_first) const {
    std::vector<double> priority(network_.nodes.size());
    for (std::size_t index = 0; index < priority.size(); ++index) {
      const Op& op = flat_[index];
      const bool is_own = problem_.home[static_cast<std::size_t>(network_.nodes[index].worker)] == op.replica;
      const double kind = op.kind == Kind::I ? 0.0 : (op.kind == Kind::F) != weights_first ? 1.0 : 2.0;
      const double foreign = own >= 2 ? (is_own ? 1.0 : 0.0) : (is_own ? 0.0 : 1.0);
      const double microbatch = op.microbatch, replica = op.replica;
      const double rank = own % 2 == 1 ? (foreign * problem_.microbatches + microbatch) : (microbatch * 2.0 + foreign);
      priority[index] = kind * 1e9 + rank * problem_.replicas + replica;
    }
    return priority;
  }

  // The start of each op in the first step under these orders; nothing if they wait for each other.
  [[nodiscard]] std::vector<double> starts_of(const std::vector<Order>& orders) {
    std::array<std::vector<std::int32_t>, 3> node_of;
    for (std::vector<std::int32_t>& table : node_of) table.assign(problem_.holder.size(), kNone);
    const auto place = [&](const Op& op) -> std::int32_t& {
      return node_of[static_cast<std::size_t>(op.kind)][problem_.index(op.replica, op.stage, op.microbatch)];
    };
    for (std::size_t index = 0; index < flat_.size(); ++index) {
      if (flat_[index].kind <= Kind::W) place(flat_[index]) = static_cast<std::int32_t>(index);
    }
    std::vector<std::int32_t> sequence(network_.nodes.size());
    std::iota(sequence.begin(), sequence.end(), 0);  // Reduce and Step keep their places behind the other ops
    for (std::size_t worker = 0; worker < orders.size(); ++worker) {
      std::int32_t at = network_.first[worker];
      for (const Op& op : orders[worker]) sequence[static_cast<std::size_t>(at++)] = place(op);
    }
    const Simulated found = brief_.run(orders_of(sequence), Detail::Times);
    if (!found.complete) return {};
    std::vector<double> starts(network_.nodes.size());
    for (std::size_t worker = 0; worker < orders.size(); ++worker) {
      const std::int32_t first = network_.first[worker], count = network_.first[worker + 1] - first;
      for (std::int32_t at = 0; at < count; ++at) {
        const auto node = static_cast<std::size_t>(sequence[static_cast<std::size_t>(first + at)]);
        starts[node] = found.ops[worker][static_cast<std::size_t>(at)].start;
      }
    }
    return starts;
  }

  // Passes forwards and backwards in turns, until one improves nothing.
  void descend(std::vector<double> priority, double patience) {
    for (double least = std::numeric_limits<double>::infinity(); !ends();) {
      spent_ += static_cast<std::int64_t>(network_.nodes.size());
      if (!pass_.run(false, priority, no_release_, patience)) return;
      const std::vector<Order> orders = orders_of(pass_.sequence());
      Simulated found = brief_.run(orders);
      if (found.complete && found.period < best_period_ * (1.0 - kTolerance)) found = simulator_.run(orders);
      if (!found.complete) return;
      if (found.period < best_period_ * (1.0 - kTolerance)) {
        best_period_ = found.period;
        best_ = pass_.sequence();
        best_starts_ = pass_.starts();
      }
      if (found.period >= least * (1.0 - kTolerance)) return;
      least = found.period;
      // Backwards, the op that ended last goes first, and a stage may end as much later as it began later.
      const std::vector<double> starts = pass_.starts();
      priority = pass_.ends();
      for (double& one : priority) one = -one;
      spent_ += static_cast<std::int64_t>(network_.nodes.size());
      if (!pass_.run(true, priority, release_backwards(starts), patience)) return;
      priority = pass_.ends();
      for (double& one : priority) one = -one;
    }
  }

  [[nodiscard]] std::vector<double> release_backwards(const std::vector<double>& starts) const {
    std::vector<double> begins(network_.workers(), 0.0), by_stage(problem_.columns.size(), 0.0);
    double latest = 0.0;
    for (std::size_t stage = 0; stage < by_stage.size(); ++stage) {
      double first = std::numeric_limits<double>::infinity();
      for (const std::int32_t worker : problem_.columns[stage]) {
        for (std::int32_t at = network_.first[static_cast<std::size_t>(worker)];
             at < network_.first[static_cast<std::size_t>(worker) + 1]; ++at) {
          if (network_.nodes[static_cast<std::size_t>(at)].kind == Kind::F)
            first = std::min(first, starts[static_cast<std::size_t>(at)]);
        }
      }
      by_stage[stage] = (problem_.barrier ? 0.0 : first - problem_.cost.step[stage]) - problem_.cost.reduce[stage];
      latest = std::max(latest, by_stage[stage]);
    }
    for (std::size_t stage = 0; stage < by_stage.size(); ++stage) {
      for (const std::int32_t worker : problem_.columns[stage]) {
        double& begin = begins[static_cast<std::size_t>(worker)];
        begin = std::max(begin, latest - by_stage[stage]);
      }
    }
    return begins;
  }

  const Problem& problem_;
  const PeriodSearch& options_;
  const std::vector<Order> ops_;
  const Network network_;
  ListPass pass_;
  Simulator simulator_;
  Simulator brief_;  // for what is no better after few steps already
  Rng rng_;
  const std::vector<double> no_release_;
  Order flat_;
  double mean_ = 0.0;
  std::int64_t spent_ = 0;
  double best_period_ = std::numeric_limits<double>::infinity();
  std::vector<std::int32_t> best_;
  std::vector<double> best_starts_;
};

}  // namespace

std::optional<Plan> search_period(const Problem& problem, const PeriodSearch& search) { return Search(problem, search).run(); }

}  // namespace adaptra::schedule
