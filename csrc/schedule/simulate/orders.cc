#include "schedule/simulate/orders.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "schedule/simulate/constants.h"

namespace adaptra::schedule {

Contents contents_of(const Problem& problem, const std::vector<Order>& orders) {
  constexpr unsigned kForward = bit_of(Kind::F), kAll = kForward | bit_of(Kind::I) | bit_of(Kind::W);
  std::vector<std::uint8_t> made(problem.holder.size(), 0);
  bool updates = false;
  if (orders.size() != problem.slow.size()) return Contents::Misplaced;
  for (std::size_t worker = 0; worker < orders.size(); ++worker) {
    for (const Op& op : orders[worker]) {
      const bool exists = op.replica >= 0 && op.replica < problem.replicas && op.stage >= 0 && op.stage < problem.stages &&
                          op.microbatch >= 0 && op.microbatch < problem.microbatches;
      if (!exists) return Contents::Misplaced;
      if (is_update(op.kind)) {
        updates = true;
        continue;
      }
      const std::size_t index = problem.index(op.replica, op.stage, op.microbatch);
      if (problem.holder[index] != static_cast<std::int32_t>(worker)) return Contents::Misplaced;
      const unsigned bits = op.kind == Kind::B ? kAll - kForward : bit_of(op.kind);
      if ((made[index] & bits) != 0) return Contents::Misplaced;
      made[index] = static_cast<std::uint8_t>(made[index] | bits);
    }
  }
  const auto all = [&](unsigned bits) {
    return std::all_of(made.begin(), made.end(), [bits](std::uint8_t found) { return found == bits; });
  };
  if (all(kAll)) return Contents::Whole;
  return updates ? Contents::Misplaced : all(kForward) ? Contents::Forwards : Contents::Partial;
}

bool keep_order(const Problem& problem, const std::vector<Order>& orders) {
  // What a worker has run of a stage: the last microbatch of each replica, and how far its update has come.
  struct Latest {
    std::int32_t worker = -1, forward = -1, input_grad = -1, weight_grad = -1;
  };
  struct Update {
    std::int32_t worker = -1;
    bool reduced = false, stepped = false;
  };
  std::vector<Latest> latest(problem.index(problem.replicas, 0, 0) / at(problem.microbatches));
  std::vector<Update> updates(at(problem.stages));
  std::vector<std::size_t> steps(orders.size(), 0), held(orders.size(), 0);
  bool updated = false;
  for (std::size_t w = 0; w < orders.size(); ++w) {
    const auto worker = static_cast<std::int32_t>(w);
    for (const Op& op : orders[w]) {
      Update& update = updates[at(op.stage)];
      if (update.worker != worker) update = {worker};
      Latest& before = latest[at(op.replica * problem.stages + op.stage)];
      if (before.worker != worker) before = {worker};
      const auto follows = [&](std::int32_t& last) { return std::exchange(last, op.microbatch) < op.microbatch; };
      const std::vector<std::int32_t>& column = problem.columns[at(op.stage)];
      switch (op.kind) {
        case Kind::F:
          if (!follows(before.forward)) return false;
          break;
        case Kind::I:
          if (!follows(before.input_grad)) return false;
          break;
        case Kind::W:
          if (update.reduced || !follows(before.weight_grad)) return false;
          break;
        case Kind::B:
          if (update.reduced || !follows(before.input_grad) || !follows(before.weight_grad)) return false;
          break;
        case Kind::Reduce:
          if (std::exchange(update.reduced, true) || op.microbatch != 0 || op.replica != problem.home[w]) return false;
          if (std::find(column.begin(), column.end(), worker) == column.end()) return false;
          updated = true;
          break;
        case Kind::Step:
          if (!update.reduced || std::exchange(update.stepped, true)) return false;
          if (op.microbatch != 0 || op.replica != problem.home[w]) return false;
          ++steps[w];
          break;
      }
    }
  }
  for (const std::vector<std::int32_t>& column : problem.columns) {
    for (const std::int32_t worker : column) ++held[at(worker)];
  }
  return !updated || steps == held;
}

Peaks peaks(const Cost& cost, const std::vector<Order>& orders) {
  const auto is_forward = [](const Op& op) { return op.kind == Kind::F; };
  const bool forward_only = std::all_of(
      orders.begin(), orders.end(), [&](const Order& order) { return std::all_of(order.begin(), order.end(), is_forward); });
  Peaks found;
  found.in_flight.assign(cost.forward.size(), 0);
  found.memory.assign(orders.size(), 0.0);
  std::vector<std::int32_t> in_flight(cost.forward.size());
  for (std::size_t worker = 0; worker < orders.size(); ++worker) {
    double held = 0.0;
    std::fill(in_flight.begin(), in_flight.end(), 0);
    for (const Op& op : orders[worker]) {
      const std::size_t stage = at(op.stage);
      switch (op.kind) {
        case Kind::F:
          held += cost.memory_forward[stage];
          ++in_flight[stage];
          found.memory[worker] = std::max(found.memory[worker], held);
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
        case Kind::Reduce:
        case Kind::Step: break;
      }
    }
  }
  return found;
}

}  // namespace adaptra::schedule
