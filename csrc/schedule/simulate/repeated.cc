#include "schedule/simulate/repeated.h"

#include <algorithm>
#include <cstddef>

#include "schedule/simulate/simulate.h"

namespace adaptra::schedule {

std::optional<double> period_of(const Problem& problem, const std::vector<Order>& orders, const Rule& rule,
                                std::int32_t steps) {
  Problem repeated = problem;
  repeated.microbatches = problem.microbatches * steps;
  std::vector<Order> all(orders.size());
  for (std::size_t rank = 0; rank < orders.size(); ++rank) {
    all[rank].reserve(orders[rank].size() * static_cast<std::size_t>(steps));
    for (std::int32_t step = 0; step < steps; ++step) {
      for (Op op : orders[rank]) {
        op.microbatch += step * problem.microbatches;
        all[rank].push_back(op);
      }
    }
  }
  const Result result = simulate(repeated, all, rule, Detail::Times);
  if (!result.complete) return std::nullopt;
  const auto count = static_cast<std::size_t>(steps), half = count / 2;
  double period = 0.0;
  for (std::size_t rank = 0; rank < orders.size(); ++rank) {
    const std::size_t ops = orders[rank].size();
    if (ops == 0) continue;
    const double last = result.ops[rank][count * ops - 1].end, middle = result.ops[rank][half * ops - 1].end;
    period = std::max(period, (last - middle) / static_cast<double>(count - half));
  }
  return period;
}

}  // namespace adaptra::schedule
