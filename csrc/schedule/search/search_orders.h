// The search for the orders in which a step takes the least time.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "schedule/simulate/problem.h"

namespace adaptra::schedule {

// Orders of the family of 1F1B, ZB-H1 and ZB-H2, one number per stage. A stage runs `warm_up` forwards, then in turn I, the W
// that is `deferred` microbatches older, and a forward.
struct Alternation {
  std::vector<std::int32_t> warm_up, deferred;
};

struct SearchOptions {
  std::vector<std::int32_t> in_flight;              // per stage: the most microbatches in flight, never exceeded
  std::vector<std::vector<std::int32_t>> warm_ups;  // starts: one number per stage, each at least 1
  std::vector<Alternation> alternations;            // the search never ends worse than any of these that fits
  std::vector<Order> start;                         // orders made to fit the memory and tried first; may be empty
  std::int64_t effort;                              // about how many ops to dispatch before giving up
  std::uint64_t seed;                               // of all random choices
  double enough;                                    // the search ends once a plan takes no longer; 0 for the shortest
  std::function<bool()> stop;                       // asked after every try once there is a plan: true ends the search
};

// Searches list-scheduling policies and steady states around the given warm-up counts, and the orders around the best of them.
// The same input leads to the same plan as long as `stop` says the same: the search itself counts ops, not time. It ends at the
// lower bound. Returns nothing when no policy led to a plan within the limits.
[[nodiscard]] std::optional<Plan> search_orders(const Problem& problem, const SearchOptions& options);

}  // namespace adaptra::schedule
