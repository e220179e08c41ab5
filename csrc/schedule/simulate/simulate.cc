#include "schedule/simulate/simulate.h"

#include <algorithm>
#include <utility>

#include "schedule/simulate/simulation_state.h"

namespace adaptra::schedule {

namespace {

// Simulates full duplex without blocking. No two ranks compete for anything there, so each runs ahead until an input is
// missing. The messages of a directed edge all come from one rank, in its order, which is also the order of time.
class LongestPath : public SimulationState {
 public:
  using SimulationState::SimulationState;

  Result run() {
    const auto ranks = static_cast<std::int32_t>(orders_.size());
    std::vector<std::int32_t> runnable;
    for (std::int32_t rank = ranks - 1; rank >= 0; --rank) runnable.push_back(rank);
    std::vector<bool> queued(at(ranks), true);
    while (!runnable.empty()) {
      const std::int32_t rank = runnable.back();
      runnable.pop_back();
      queued[at(rank)] = false;
      run_ahead(rank, [&](std::int32_t woken) {
        if (woken == rank || queued[at(woken)]) return;
        queued[at(woken)] = true;
        runnable.push_back(woken);
      });
    }
    result_.complete = finish();
    return std::move(result_);
  }

 private:
  template <typename Wake>
  void run_ahead(std::int32_t rank, Wake wake) {
    const Order& order = orders_[at(rank)];
    double now = result_.last_end[at(rank)];
    while (position_[at(rank)] < order.size()) {
      const Op& op = order[position_[at(rank)]];
      const double there = inputs_there(op);
      if (there < 0.0) return;
      const double start = std::max(now, there);
      now = start + problem_.cost.duration(op.stage, op.kind);
      record(rank, start, now);
      publish(op, now, [&](std::int32_t consumer, std::size_t column) {
        make_available(consumer, op.microbatch, column, send(op, consumer, now));
        wake(problem_.placement[at(consumer)]);
      });
    }
  }

  // Puts a message on its edge and returns when it arrives.
  double send(const Op& op, std::int32_t consumer, double posted) {
    const bool forward = consumer > op.stage;
    const std::size_t edge = at(std::min(op.stage, consumer));
    const Cost& cost = problem_.cost;
    double& free = forward ? forward_free_[edge] : backward_free_[edge];
    const double departed = std::max(posted, free);
    free = departed + (forward ? cost.occupancy_forward : cost.occupancy_backward)[edge];
    const double arrived = free + (forward ? cost.latency_forward : cost.latency_backward)[edge];
    if (times_wanted_) result_.messages.push_back({op.stage, consumer, op.microbatch, posted, departed, arrived});
    return arrived;
  }

  std::vector<double> forward_free_ = std::vector<double>(at(stages_), 0.0);
  std::vector<double> backward_free_ = std::vector<double>(at(stages_), 0.0);
};

}  // namespace

Result simulate(const Problem& problem, const std::vector<Order>& orders, const Rule& rule, Detail detail) {
  if (problem.cost.half_duplex || problem.cost.blocking != Blocking::None) {
    return simulate_events(problem, orders, rule, detail);
  }
  return LongestPath(problem, orders, rule, detail).run();
}

bool well_formed(const Problem& problem, const std::vector<Order>& orders) {
  const std::int32_t stages = problem.cost.stages();
  std::vector<std::uint8_t> seen(static_cast<std::size_t>(stages) * static_cast<std::size_t>(problem.microbatches), 0);
  for (std::size_t rank = 0; rank < orders.size(); ++rank) {
    for (const Op& op : orders[rank]) {
      if (op.stage < 0 || op.stage >= stages || op.microbatch < 0 || op.microbatch >= problem.microbatches) return false;
      const auto stage = static_cast<std::size_t>(op.stage);
      if (static_cast<std::size_t>(problem.placement[stage]) != rank) return false;
      auto& kinds = seen[stage * static_cast<std::size_t>(problem.microbatches) + static_cast<std::size_t>(op.microbatch)];
      if (kinds & bit_of(op.kind)) return false;
      kinds = static_cast<std::uint8_t>(kinds | bit_of(op.kind));
    }
  }
  return true;
}

Peaks peaks(const Problem& problem, const std::vector<Order>& orders) {
  const Cost& cost = problem.cost;
  const auto is_forward = [](const Op& op) { return op.kind == Kind::F; };
  const bool forward_only =
      std::all_of(orders.begin(), orders.end(), [&](const Order& o) { return std::all_of(o.begin(), o.end(), is_forward); });
  Peaks found;
  found.in_flight.assign(cost.forward.size(), 0);
  found.memory.assign(orders.size(), 0.0);
  std::vector<std::int32_t> in_flight(cost.forward.size(), 0);
  for (std::size_t rank = 0; rank < orders.size(); ++rank) {
    double held = 0.0;
    for (const Op& op : orders[rank]) {
      const auto stage = static_cast<std::size_t>(op.stage);
      switch (op.kind) {
        case Kind::F:
          held += cost.memory_forward[stage];
          ++in_flight[stage];
          found.memory[rank] = std::max(found.memory[rank], held);
          found.in_flight[stage] = std::max(found.in_flight[stage], in_flight[stage]);
          if (forward_only) {
            held -= cost.memory_forward[stage];
            --in_flight[stage];
          }
          break;
        case Kind::I:
          held -= cost.memory_input_grad[stage];
          --in_flight[stage];
          break;
        case Kind::W: held -= cost.memory_forward[stage] - cost.memory_input_grad[stage]; break;
        case Kind::B:
          held -= cost.memory_forward[stage];
          --in_flight[stage];
          break;
      }
    }
  }
  return found;
}

}  // namespace adaptra::schedule
