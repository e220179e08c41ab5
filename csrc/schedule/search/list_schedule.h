// List scheduling: a greedy rule makes orders by playing the step forward in time.
//
// Whenever a rank is free it starts the op that its policy prefers among those whose inputs are there. Input gradients come
// first, then forwards within their quota. Nobody waits for weight gradients, so they come last unless too many have been put
// off. A rank may stay idle when something more urgent is about to arrive. Orders made this way keep F, I and W each in
// microbatch order on every stage. The scheduler's times only guide it: makespans come from simulate().
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "schedule/simulate/problem.h"
#include "schedule/simulate/sequence.h"

namespace adaptra::schedule {

// The scheduler's preferences on one stage.
struct StagePolicy {
  std::int32_t warm_up = 1;        // forwards that go before the first input gradient even when that is ready (x_i)
  std::int32_t in_flight = 1;      // most forwards started whose input gradient has not ended
  float patience_weight = 0.0F;    // idle rather than start a W when an awaited input is due within this share of W's duration
  float patience_forward = 0.0F;   // the same for starting an F when an input gradient is due
  std::int32_t backlog = 1 << 30;  // most W put off before they go ahead of forwards
};

// Preferences for each stage. With `deep_first`, a rank of several stages prefers the deepest one with a ready forward.
struct Policy {
  std::vector<StagePolicy> stages;
  bool deep_first = true;
};

class ListScheduler {
 public:
  explicit ListScheduler(const Problem& problem);

  // Makes the sequences of a policy. False when some rank could no longer end by `cutoff`, or at a deadlock, which only ranks
  // with several stages run into.
  //
  // Requires in_flight >= 1 everywhere and, under a memory limit, room for one microbatch.
  [[nodiscard]] bool run(const Policy& policy, double cutoff);

  [[nodiscard]] const std::vector<Sequence>& sequences() const { return sequences_; }

 private:
  // The numbers of ops that have started.
  struct StageState {
    std::int32_t forwards, input_grads, weight_grads, in_flight;
  };
  struct RankState {
    bool running;
    Kind kind;
    std::int32_t stage;
    double memory, work_left, urgent_left;  // urgent: its F and I
  };
  struct Edge {
    double occupancy, latency, free;
  };
  // The time for which a message holds its receiver, where communication holds receivers too.
  struct Hold {
    double from, until;
  };
  struct Choice {
    std::int32_t stage;
    Kind kind;
  };

  void reset();
  void set_time(std::int32_t rank, double time);
  void finish(RankState& rank);
  [[nodiscard]] double held_until(std::int32_t rank, double now) const;
  [[nodiscard]] bool forward_allowed(std::int32_t rank, std::int32_t stage) const;
  [[nodiscard]] std::optional<Choice> preferred(std::int32_t rank, double now, double& wake) const;
  double start(std::int32_t rank, Choice choice, double now);
  double send(std::int32_t stage, bool forward, std::int32_t microbatch, double now, double end);

  const Problem& problem_;
  const Cost& cost_;
  const std::int32_t stages_count_;
  const Policy* policy_ = nullptr;
  std::vector<std::vector<std::int32_t>> stages_of_;  // per rank, deepest first
  std::vector<double> limit_, work_, urgent_, tail_;  // per rank
  std::vector<StageState> stages_;
  std::vector<RankState> ranks_;
  std::vector<Edge> forward_, backward_;
  std::vector<double> forward_due_, gradient_due_;  // per stage and microbatch, infinity while not known
  std::vector<Hold> holds_;                         // per stage and direction

  // The time at which each rank decides next: the leaves of a tree whose inner nodes hold the rank that decides first.
  std::vector<double> time_;
  std::vector<std::int32_t> first_;
  std::int32_t leaves_ = 1;
  std::vector<Sequence> sequences_;
  std::int64_t ops_left_ = 0;
};

}  // namespace adaptra::schedule
