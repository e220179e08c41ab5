// List scheduling over an event simulation: orders made by a greedy rule.
//
// A dispatcher plays the step forward in time. Whenever a rank is free it starts the op that its policy prefers among those
// whose inputs are there: input gradients, then forwards within their quota, then weight gradients, which nobody waits for
// unless too many have been put off. It may leave a rank idle when it knows that something more urgent is about to arrive.
// Orders made this way keep F, I and W each in microbatch order on every stage. What the dispatcher believes about time is
// never the last word: simulate() is.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "schedule/types.h"

namespace adaptra::schedule {

// What the dispatcher prefers on one stage.
struct StagePolicy {
  std::int32_t warm_up = 1;        // forwards that go before the first input gradient even when that is ready (x_i)
  std::int32_t in_flight = 1;      // most forwards started whose input gradient has not ended
  float patience_weight = 0.0F;    // idle rather than start a W when an awaited input is due within this share of W's duration
  float patience_forward = 0.0F;   // the same for starting an F when an input gradient is due
  std::int32_t backlog = 1 << 30;  // most W put off before they go ahead of forwards
};

// A rule for each stage. Ranks that hold several stages prefer the deepest stage with a ready forward when `deep_first`.
struct Policy {
  std::vector<StagePolicy> stages;
  bool deep_first = true;
};

// The orders that a policy leads to; none when the policy runs into a deadlock, which only ranks with several stages can, or
// when some rank could no longer end by `cutoff`.
//
// Requires in_flight >= 1 everywhere and, under a memory limit, room for one microbatch.
[[nodiscard]] std::optional<std::vector<Order>> list_schedule(const Problem& problem, const Policy& policy, double cutoff);

}  // namespace adaptra::schedule
