#include "schedule/simulate/orders.h"

#include <algorithm>
#include <cstddef>

#include "schedule/simulate/constants.h"

namespace adaptra::schedule {

Contents contents_of(const Job& job, const std::vector<JobOrder>& orders) {
  constexpr unsigned kForward = bit_of(JobKind::F), kAll = kForward | bit_of(JobKind::I) | bit_of(JobKind::W);
  std::vector<std::uint8_t> made(job.holder.size(), 0);
  bool updates = false;
  if (orders.size() != job.slow.size()) return Contents::Misplaced;
  for (std::size_t worker = 0; worker < orders.size(); ++worker) {
    for (const JobOp& op : orders[worker]) {
      const bool exists = op.replica >= 0 && op.replica < job.replicas && op.stage >= 0 && op.stage < job.stages &&
                          op.microbatch >= 0 && op.microbatch < job.microbatches;
      if (!exists) return Contents::Misplaced;
      if (op.kind == JobKind::Reduce || op.kind == JobKind::Step) {
        updates = true;
        continue;
      }
      const std::size_t index = job.index(op.replica, op.stage, op.microbatch);
      if (job.holder[index] != static_cast<std::int32_t>(worker)) return Contents::Misplaced;
      const unsigned bits = op.kind == JobKind::B ? kAll - kForward : bit_of(op.kind);
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

Peaks peaks(const Cost& cost, const std::vector<JobOrder>& orders) {
  const auto is_forward = [](const JobOp& op) { return op.kind == JobKind::F; };
  const bool forward_only = std::all_of(
      orders.begin(), orders.end(), [&](const JobOrder& order) { return std::all_of(order.begin(), order.end(), is_forward); });
  Peaks found;
  found.in_flight.assign(cost.forward.size(), 0);
  found.memory.assign(orders.size(), 0.0);
  std::vector<std::int32_t> in_flight(cost.forward.size());
  for (std::size_t worker = 0; worker < orders.size(); ++worker) {
    double held = 0.0;
    std::fill(in_flight.begin(), in_flight.end(), 0);
    for (const JobOp& op : orders[worker]) {
      const std::size_t stage = at(op.stage);
      switch (op.kind) {
        case JobKind::F:
          held += cost.memory_forward[stage];
          ++in_flight[stage];
          found.memory[worker] = std::max(found.memory[worker], held);
          found.in_flight[stage] = std::max(found.in_flight[stage], in_flight[stage]);
          if (forward_only) {
            held -= cost.memory_forward[stage];
            --in_flight[stage];
          }
          break;
        case JobKind::I:
          held -= cost.memory_input_grad[stage];
          --in_flight[stage];
          break;
        case JobKind::W: held -= cost.memory_forward[stage] - cost.memory_input_grad[stage]; break;
        case JobKind::B:
          held -= cost.memory_forward[stage];
          --in_flight[stage];
          break;
        case JobKind::Reduce:
        case JobKind::Step: break;
      }
    }
  }
  return found;
}

}  // namespace adaptra::schedule
