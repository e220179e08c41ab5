#include "schedule/list_schedule.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

namespace adaptra::schedule {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kTolerance = 1e-9;

std::size_t at(std::int32_t index) { return static_cast<std::size_t>(index); }

enum class EventKind : std::uint8_t { End, ForwardArrives, GradientArrives, Wake };

// `who` is a rank for End and Wake, a stage for arrivals.
struct Event {
  double time;
  EventKind kind;
  std::int32_t who;
};

bool later(const Event& a, const Event& b) {
  if (a.time != b.time) return a.time > b.time;
  if (a.kind != b.kind) return a.kind > b.kind;
  return a.who > b.who;
}

// What the dispatcher knows of one stage: how many ops of each kind have started, how many inputs are there, and when each
// input was or will be there as far as known.
struct StageState {
  std::int32_t forwards = 0, input_grads = 0, weight_grads = 0;
  std::int32_t forwards_there = 0, gradients_there = 0;
  std::int32_t in_flight = 0;
  std::vector<double> forward_due, gradient_due;
};

struct RankState {
  std::vector<std::int32_t> stages;  // deepest first
  bool running = false;
  Op op{};
  double held_until = 0.0;  // by blocking communication
  double memory = 0.0;
  double limit = kNever;
  double work_left = 0.0;
  bool touched = true;
};

class Dispatcher {
 public:
  Dispatcher(const Problem& problem, const Policy& policy, double cutoff)
      : problem_(problem), cost_(problem.cost), policy_(policy), cutoff_(cutoff) {
    const std::int32_t stages = cost_.stages();
    const auto edges = at(stages) - 1;
    free_forward_.assign(edges, 0.0);
    free_backward_.assign(edges, 0.0);
    ranks_.resize(at(problem.ranks));
    stages_.resize(at(stages));
    orders_.resize(at(problem.ranks));
    const auto microbatches = at(problem.microbatches);
    for (std::int32_t stage = stages - 1; stage >= 0; --stage) {
      RankState& rank = ranks_[at(problem.placement[at(stage)])];
      rank.stages.push_back(stage);
      rank.work_left +=
          problem.microbatches * (cost_.forward[at(stage)] + cost_.input_grad[at(stage)] + cost_.weight_grad[at(stage)]);
      stages_[at(stage)].forward_due.assign(microbatches, stage == 0 ? 0.0 : kNever);
      stages_[at(stage)].gradient_due.assign(microbatches, kNever);
    }
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      orders_[rank].reserve(ranks_[rank].stages.size() * microbatches * 3);
      if (!cost_.memory_limit.empty()) ranks_[rank].limit = cost_.memory_limit[rank] + kTolerance;
    }
    stages_[0].forwards_there = problem.microbatches;
    ops_left_ = static_cast<std::int64_t>(3) * stages * problem.microbatches;
  }

  std::optional<std::vector<Order>> run() {
    double now = 0.0;
    while (true) {
      for (std::int32_t rank = 0; rank < problem_.ranks; ++rank) {
        if (ranks_[at(rank)].touched && !dispatch(rank, now)) return std::nullopt;
      }
      if (events_.empty()) break;
      now = events_.front().time;
      while (!events_.empty() && events_.front().time <= now) {
        std::pop_heap(events_.begin(), events_.end(), later);
        const Event event = events_.back();
        events_.pop_back();
        handle(event);
      }
    }
    if (ops_left_ > 0) return std::nullopt;
    return std::move(orders_);
  }

 private:
  void push(double time, EventKind kind, std::int32_t who) {
    events_.push_back({time, kind, who});
    std::push_heap(events_.begin(), events_.end(), later);
  }

  void handle(const Event& event) {
    switch (event.kind) {
      case EventKind::End: end(event.who, event.time); return;
      case EventKind::Wake: ranks_[at(event.who)].touched = true; return;
      case EventKind::ForwardArrives:
        ++stages_[at(event.who)].forwards_there;
        ranks_[at(problem_.placement[at(event.who)])].touched = true;
        return;
      case EventKind::GradientArrives:
        ++stages_[at(event.who)].gradients_there;
        ranks_[at(problem_.placement[at(event.who)])].touched = true;
        return;
    }
  }

  void end(std::int32_t rank_index, double now) {
    RankState& rank = ranks_[at(rank_index)];
    rank.running = false;
    rank.touched = true;
    const Op op = rank.op;
    const auto stage = at(op.stage);
    switch (op.kind) {
      case Kind::F:
        if (op.stage + 1 == cost_.stages()) {
          ++stages_[stage].gradients_there;
        } else {
          send(op, now);
        }
        return;
      case Kind::I:
        rank.memory -= cost_.memory_input_grad[stage];
        --stages_[stage].in_flight;
        if (op.stage > 0) send(op, now);
        return;
      case Kind::W: rank.memory -= cost_.memory_forward[stage] - cost_.memory_input_grad[stage]; return;
      case Kind::B: return;  // never dispatched
    }
  }

  // When a message whose producer ends at `ready` departs and arrives.
  struct Travel {
    double departs, arrives;
  };

  Travel travel(const Op& op, double ready) {
    const bool forward = op.kind == Kind::F;
    const auto edge = at(forward ? op.stage : op.stage - 1);
    const double free = edge_free(edge, forward);
    const double departs = std::max(ready, free);
    const double occupancy = forward ? cost_.occupancy_forward[edge] : cost_.occupancy_backward[edge];
    const double latency = forward ? cost_.latency_forward[edge] : cost_.latency_backward[edge];
    return {departs, departs + occupancy + latency};
  }

  double& edge_free(std::size_t edge, bool forward) {
    return forward || cost_.half_duplex ? free_forward_[edge] : free_backward_[edge];
  }

  void send(const Op& op, double now) {
    const bool forward = op.kind == Kind::F;
    const std::int32_t receiver = forward ? op.stage + 1 : op.stage - 1;
    const auto edge = at(std::min(op.stage, receiver));
    const Travel message = travel(op, now);
    edge_free(edge, forward) = message.departs + (forward ? cost_.occupancy_forward[edge] : cost_.occupancy_backward[edge]);
    (forward ? stages_[at(receiver)].forward_due : stages_[at(receiver)].gradient_due)[at(op.microbatch)] = message.arrives;
    push(message.arrives, forward ? EventKind::ForwardArrives : EventKind::GradientArrives, receiver);
    switch (cost_.blocking) {
      case Blocking::None: return;
      case Blocking::Send: hold(op.stage, message.arrives); return;
      case Blocking::Both:
        hold(op.stage, message.arrives);
        hold(receiver, message.arrives);
        return;
    }
  }

  void hold(std::int32_t stage, double until) {
    RankState& rank = ranks_[at(problem_.placement[at(stage)])];
    if (until <= rank.held_until) return;
    rank.held_until = until;
    push(until, EventKind::Wake, problem_.placement[at(stage)]);
  }

  // Starts the preferred op of a free rank, if any. False when the rank can't end by the cutoff any more.
  bool dispatch(std::int32_t rank_index, double now) {
    RankState& rank = ranks_[at(rank_index)];
    rank.touched = false;
    if (rank.running || now < rank.held_until) return true;
    if (now + rank.work_left > cutoff_) return false;
    const std::optional<Op> op = preferred(rank, now);
    if (!op) return true;
    start(rank_index, *op, now);
    return true;
  }

  bool forward_allowed(const RankState& rank, std::int32_t stage) const {
    const StageState& state = stages_[at(stage)];
    return state.forwards < problem_.microbatches && state.in_flight < policy_.stages[at(stage)].in_flight &&
           rank.memory + cost_.memory_forward[at(stage)] <= rank.limit;
  }

  std::optional<Op> preferred(const RankState& rank, double now) const {
    std::int32_t gradient_stage = -1, forward_stage = -1, weight_stage = -1;
    double gradient_due = kNever, forward_due = kNever;
    for (const std::int32_t stage : rank.stages) {
      const StageState& state = stages_[at(stage)];
      if (state.input_grads < problem_.microbatches) {
        if (state.input_grads < state.gradients_there) {
          if (gradient_stage < 0) gradient_stage = stage;
        } else {
          gradient_due = std::min(gradient_due, state.gradient_due[at(state.input_grads)]);
        }
      }
      if (forward_allowed(rank, stage)) {
        if (state.forwards < state.forwards_there) {
          if (forward_stage < 0 || !policy_.deep_first) forward_stage = stage;
        } else {
          forward_due = std::min(forward_due, state.forward_due[at(state.forwards)]);
        }
      }
      if (weight_stage < 0 && state.weight_grads < state.input_grads) weight_stage = stage;
    }
    if (gradient_stage >= 0) {
      const StageState& state = stages_[at(gradient_stage)];
      const bool warming_up = state.input_grads == 0 && state.forwards < policy_.stages[at(gradient_stage)].warm_up;
      if (!warming_up || forward_stage != gradient_stage) return Op{gradient_stage, Kind::I, state.input_grads};
    }
    const bool overdue = weight_stage >= 0 && stages_[at(weight_stage)].input_grads - stages_[at(weight_stage)].weight_grads >
                                                  policy_.stages[at(weight_stage)].backlog;
    if (forward_stage >= 0 && !overdue) {
      const double patience = policy_.stages[at(forward_stage)].patience_forward;
      if (gradient_stage >= 0 || patience == 0.0 || gradient_due >= now + patience * cost_.forward[at(forward_stage)]) {
        return Op{forward_stage, Kind::F, stages_[at(forward_stage)].forwards};
      }
      return std::nullopt;
    }
    if (weight_stage >= 0) {
      const double patience = policy_.stages[at(weight_stage)].patience_weight;
      const double due = std::min(gradient_due, forward_due);
      if (patience == 0.0 || due >= now + patience * cost_.weight_grad[at(weight_stage)]) {
        return Op{weight_stage, Kind::W, stages_[at(weight_stage)].weight_grads};
      }
    }
    return std::nullopt;
  }

  void start(std::int32_t rank_index, const Op& op, double now) {
    RankState& rank = ranks_[at(rank_index)];
    StageState& state = stages_[at(op.stage)];
    const double duration = cost_.duration(op.stage, op.kind);
    const double ends = now + duration;
    rank.running = true;
    rank.op = op;
    rank.work_left -= duration;
    --ops_left_;
    orders_[at(rank_index)].push_back(op);
    push(ends, EventKind::End, rank_index);
    switch (op.kind) {
      case Kind::F:
        ++state.forwards;
        ++state.in_flight;
        rank.memory += cost_.memory_forward[at(op.stage)];
        if (op.stage + 1 == cost_.stages()) {
          state.gradient_due[at(op.microbatch)] = ends;
        } else {
          stages_[at(op.stage + 1)].forward_due[at(op.microbatch)] = travel(op, ends).arrives;
        }
        return;
      case Kind::I:
        ++state.input_grads;
        if (op.stage > 0) stages_[at(op.stage - 1)].gradient_due[at(op.microbatch)] = travel(op, ends).arrives;
        return;
      case Kind::W: ++state.weight_grads; return;
      case Kind::B: return;  // never dispatched
    }
  }

  const Problem& problem_;
  const Cost& cost_;
  const Policy& policy_;
  double cutoff_;
  std::vector<double> free_forward_, free_backward_;
  std::vector<RankState> ranks_;
  std::vector<StageState> stages_;
  std::vector<Order> orders_;
  std::vector<Event> events_;
  std::int64_t ops_left_ = 0;
};

}  // namespace

std::optional<std::vector<Order>> list_schedule(const Problem& problem, const Policy& policy, double cutoff) {
  return Dispatcher(problem, policy, cutoff).run();
}

}  // namespace adaptra::schedule
