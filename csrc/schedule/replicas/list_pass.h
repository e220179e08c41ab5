// List scheduling of several replicas, forwards or backwards in time.
//
// Whenever a worker is free it starts the op with the least priority among those whose inputs are there and whose microbatch
// fits into memory. A patient worker starts no op that would delay one of less priority whose inputs are on their way.
// Backwards, needs and times are turned round: ops start from their ends, memory is taken by W and I, and freed by F. Passes in
// turn, each with the times of the one before as priorities, make schedules denser. This is forward-backward improvement, known
// from project scheduling under limited resources.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/replicas/network.h"

namespace adaptra::schedule {

// The memory of each worker, in any unit, and what a microbatch takes of it.
struct Room {
  std::vector<double> most;            // per worker
  std::vector<double> taken;           // per stage: from the start of F
  std::vector<double> freed_by_input;  // per stage: the part that is freed when I ends; W frees the rest when it ends
};

// That of workers which may hold so many microbatches from the start of F to the end of W.
[[nodiscard]] Room room_for(const std::vector<std::int32_t>& microbatches, const Problem& problem);

// That of the cost model, without a limit where it has none.
[[nodiscard]] Room room_of(const Problem& problem);

class ListPass {
 public:
  // Keeps references to both.
  ListPass(const Network& network, const Room& room);

  // Makes starts() and ends(), per node; backwards, both count from the end of the step. Reduce and Step take no part.
  //
  // `priority` has a number per node, the least goes first. `release` has the time per worker before which it starts nothing.
  // `patience` is the part of an op's duration for which a worker waits instead of starting it; 0 for never, 1 for always.
  // False at a deadlock, which only memory limits cause.
  [[nodiscard]] bool run(bool backwards, const std::vector<double>& priority, const std::vector<double>& release,
                         double patience);

  // The nodes of each worker in the order of their starts, one worker after the other as in Network::first. Reduce and Step
  // come last. Of a run forwards only.
  [[nodiscard]] const std::vector<std::int32_t>& sequence() const { return sequence_; }
  [[nodiscard]] const std::vector<double>& starts() const { return starts_; }
  [[nodiscard]] const std::vector<double>& ends() const { return ends_; }

 private:
  // An op that waits for another one, and the message between them. Its delay is that of one that occupies nothing, or what
  // it takes on top of its occupancy.
  struct Dependent {
    std::int32_t node;
    double delay;
    std::int32_t transfer = kNone;
  };
  struct Graph {
    std::vector<std::int32_t> needed;                // per node: how many ops it waits for
    std::vector<std::vector<Dependent>> dependents;  // per node
  };

  void add(std::int32_t before, std::int32_t after, double delay, std::int32_t transfer = kNone);
  [[nodiscard]] double occupancy(const Dependent& dependent) const;
  [[nodiscard]] double arrival(const Dependent& dependent, double posted);
  void start(std::int32_t node, double now);
  void offer(std::int32_t node);
  void push(std::int32_t node);
  [[nodiscard]] bool fits(std::int32_t node) const;
  [[nodiscard]] bool delays_a_better_one(std::int32_t node, double now) const;
  [[nodiscard]] bool goes_later(std::int32_t a, std::int32_t b) const;
  [[nodiscard]] std::int32_t take(std::size_t worker, double now);
  [[nodiscard]] double taken_by(const Node& node) const;
  [[nodiscard]] double freed_by(const Node& node) const;
  [[nodiscard]] double lasting(const Node& node) const;
  void hold(const Node& node, double more);
  [[nodiscard]] std::size_t place_of(std::size_t worker, std::int32_t stage) const {
    return worker * network_.problem.columns.size() + static_cast<std::size_t>(stage);
  }

  const Network& network_;
  const Room& room_;
  std::vector<std::vector<std::int32_t>> stages_of_;  // per worker
  Graph forward_, backward_;
  std::int64_t ops_ = 0;

  // The state of one run.
  bool backwards_ = false;
  const std::vector<double>* priority_ = nullptr;
  std::vector<double> starts_, ends_, arrives_;  // per node
  std::vector<double> resource_free_;            // per link and port
  std::vector<std::int32_t> needed_;             // per node
  double patience_ = 0.0;
  std::vector<std::int32_t> not_started_;           // per node: how many of the ops that it waits for
  std::vector<double> expected_;                    // per node: when its inputs are there, as if no message queued up
  std::vector<std::vector<std::int32_t>> expects_;  // per worker: the ops whose inputs are all on their way
  std::vector<std::int32_t> sequence_, next_;       // next_: per worker, the place in sequence_ of its next op
  std::vector<std::vector<std::int32_t>> offered_;  // per worker: the ops whose inputs are there, as a heap by priority
  std::vector<double> held_;                        // per worker
  std::vector<std::int32_t> begun_;                 // per worker and stage, of those that have several: microbatches
  std::vector<bool> busy_;                          // per worker
  std::vector<std::int32_t> put_aside_;
};

}  // namespace adaptra::schedule
