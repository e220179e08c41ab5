// Exact simulation of a step, or of several in a row, of one pipeline or of several replicas. There are no time steps. It adds
// and compares the same doubles in the same order wherever it runs, so results are equal to the last digit on every machine.
//
// A worker executes its order strictly; an op starts as soon as the one before it has ended and its inputs are there. A
// worker's next step begins when its last op has ended, and without Steps in its order, after their time. A message whose
// producer ends at e departs at d = max(e, what it occupies is free). A Reduce ends on all workers of its stage at once, its
// time after the last of them has come to it. With a barrier a Step waits for the Reduce of all workers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

#include "schedule/simulate/problem.h"
#include "schedule/simulate/rule.h"

namespace adaptra::schedule {

struct Interval {
  double start;
  double end;
};

// One message of a replica from a stage to its neighbour: handed over at `posted`, on its way from `departed`, there at
// `arrived`. Between stages of one worker it takes no time.
struct Message {
  std::int32_t replica;
  std::int32_t source;
  std::int32_t destination;
  std::int32_t microbatch;
  double posted;
  double departed;
  double arrived;
};

// The detail to record. A planner that compares times needs no more than the summary.
enum class Detail : std::uint8_t { Summary, Times };

struct Simulated {
  bool complete = false;  // false: a deadlock, and every other field is meaningless
  double makespan = 0.0;  // the end of the first step
  double period = 0.0;    // of several steps: the steady distance between their ends, of the slowest worker
  // The rest is empty without Detail::Times. Of the first step, per worker: the time for which it works, the start of its first
  // op and the end of its last one. They are zero for a worker without ops.
  std::vector<double> busy, first_start, last_end;
  std::vector<std::vector<Interval>> ops;  // per worker: of its order, once per step
  std::vector<Message> messages;           // of the first step, in no promised order
};

// Simulates again and again under different orders. The period is taken between the ends of the middle and of the last step.
//
// Steps of training overlap by less than two. A worker reaches step k + 2 only when every worker of its replica has come to
// step k + 1. So two slots hold all that any op still needs. Forwards alone have a slot for each step.
class Simulator {
 public:
  // Keeps a reference to the problem. Throws std::invalid_argument when its rule can't be met by messages between neighbours.
  Simulator(const Problem& problem, std::int32_t steps);

  // Every op must lie on its holder and occur once. With several steps every microbatch must have F on every stage, and either
  // all or none must have I with W, or B. Reduce and Step of a stage stand in this order behind its W.
  [[nodiscard]] Simulated run(const std::vector<Order>& orders, Detail detail = Detail::Summary);

 private:
  // What a message between two workers occupies: their link, and the ports that take time.
  struct Way {
    std::int32_t destination, from, to;  // the worker that receives, and both stages
    std::size_t occupied = 0;
    std::array<std::size_t, 3> resource = {};
    std::array<double, 3> occupancy = {};
    double latency = 0.0;
  };
  struct Travel {
    double departed, arrived;
  };
  struct Slot;
  struct Worker {
    const Op* next = nullptr;  // in its order
    const Op* end = nullptr;   // of its order
    Slot* slot = nullptr;      // of its step
    std::int32_t step = 0;
    double free = 0.0;      // the time from which it may start an op
    double update = 0.0;    // the time between its steps, if its order has no Step
    bool queued = true;     // whether it is among those to be looked at
    bool running = false;   // whether its next op has begun, or will at a time that is known
    bool has_come = false;  // whether its next op is a Reduce to which it has come
  };
  struct Reduction {
    std::int32_t step = -1;
    std::size_t come = 0;
    double last = 0.0;
  };
  struct Slot {
    std::vector<double> there;       // per microbatch of a stage of a replica, and column: since when; negative: not yet
    std::vector<Reduction> reduced;  // per stage
    Reduction barrier;               // of all Reduce ops
  };
  // In one instant come rounds: ops end, then all that can begin. What takes no time ends in the next round. On a shared link a
  // forward message goes first on a tie, and then that of the first worker.
  struct Event {
    double time;
    std::int32_t round;
    bool begins;
    bool goes_second;
    std::int32_t worker;
    bool operator>(const Event& other) const;
  };

  void reset(const std::vector<Order>& orders, Detail detail);
  [[nodiscard]] bool find_ready(std::int32_t worker, double& ready);
  [[nodiscard]] bool find_reduced(std::int32_t worker, const Op& op, double& ready);
  [[nodiscard]] bool find_all_reduced(std::int32_t worker, double& ready);
  [[nodiscard]] double inputs_there(std::int32_t worker, const Op& op) const;
  double begin(std::int32_t worker, double start);
  void finish(std::int32_t worker, double end);
  void publish(std::int32_t worker, const Op& op, double end);
  Travel send(const Way& way, double posted);
  const Way& way_of(std::int32_t source, std::int32_t destination, std::int32_t from, std::int32_t to);
  const Way& new_way(std::int32_t source, std::int32_t destination, std::int32_t from, std::int32_t to);
  std::size_t resource_of(std::int32_t source, std::int32_t destination);
  void wake(std::int32_t worker);
  void run_in_any_order();
  void run_in_time_order();
  void look_at(std::int32_t worker);
  void begin_at(std::int32_t worker, double time);
  void end_at(std::int32_t worker, double time);
  [[nodiscard]] double held_until(std::int32_t worker);

  const Problem& problem_;
  const std::int32_t steps_;
  const CompiledRule rule_;
  std::vector<double> duration_;        // per stage and kind
  std::vector<std::vector<Way>> ways_;  // per sending worker
  std::vector<std::vector<std::pair<std::int32_t, std::size_t>>>
      numbers_;  // per first worker: the second one, and the resource
  bool needs_time_order_;
  std::size_t reduces_ = 0;  // the Reduce ops of one step

  const std::vector<Order>* orders_ = nullptr;
  bool times_wanted_ = false;
  std::vector<Slot> slots_;
  std::vector<Worker> workers_;
  std::vector<double> resource_free_;
  std::vector<std::int32_t> ready_;             // the workers to be looked at
  std::vector<std::int32_t> at_barrier_;        // the workers that wait there
  std::vector<std::vector<Travel>> under_way_;  // per worker, the messages to it, where they hold it
  std::vector<double> ends_;                    // per worker and step: the end of its last op
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  double now_ = 0.0;
  std::int32_t round_ = 0;  // of this instant
  Simulated result_;
};

}  // namespace adaptra::schedule
