#include "schedule/search/list_schedule.h"

#include <algorithm>
#include <cstddef>

#include "schedule/bounds/bounds.h"
#include "schedule/simulate/constants.h"

namespace adaptra::schedule {
ListScheduler::ListScheduler(const Problem& problem)
    : problem_(problem),
      cost_(problem.cost),
      stages_count_(problem.stages),
      stages_of_(at(problem.workers)),
      limit_(at(problem.workers), kNever),
      work_(at(problem.workers), 0.0),
      urgent_(at(problem.workers), 0.0),
      tail_(least_tails(problem)),
      stages_(at(stages_count_)),
      ranks_(at(problem.workers)),
      forward_due_(at(stages_count_) * at(problem.microbatches)),
      gradient_due_(at(stages_count_) * at(problem.microbatches)),
      holds_(problem.cost.blocking == Blocking::Both ? 2 * at(stages_count_) : 0),
      sequences_(at(problem.workers)) {
  for (std::int32_t stage = stages_count_ - 1; stage >= 0; --stage) {
    const std::size_t rank = at(problem.placement[at(stage)]);
    stages_of_[rank].push_back(stage);
    urgent_[rank] += problem.microbatches * (cost_.forward[at(stage)] + cost_.input_grad[at(stage)]);
    work_[rank] +=
        problem.microbatches * (cost_.forward[at(stage)] + cost_.input_grad[at(stage)] + cost_.weight_grad[at(stage)]);
  }
  for (std::size_t rank = 0; rank < cost_.memory_limit.size(); ++rank) limit_[rank] = cost_.memory_limit[rank] + kTolerance;
  for (std::size_t rank = 0; rank < sequences_.size(); ++rank)
    sequences_[rank].reserve(3 * at(problem.microbatches) * stages_of_[rank].size());
  for (std::size_t edge = 0; edge + 1 < stages_.size(); ++edge) {
    forward_.push_back({cost_.occupancy_forward[edge], cost_.latency_forward[edge], 0.0});
    backward_.push_back({cost_.occupancy_backward[edge], cost_.latency_backward[edge], 0.0});
  }
  while (leaves_ < problem.workers) leaves_ *= 2;
  time_.assign(at(leaves_), kNever);
  first_.assign(at(2 * leaves_), 0);
  for (std::int32_t leaf = 0; leaf < leaves_; ++leaf) first_[at(leaves_ + leaf)] = leaf;
}

bool ListScheduler::run(const Policy& policy, double cutoff) {
  policy_ = &policy;
  reset();
  while (true) {
    const std::int32_t index = first_[1];
    const double now = time_[at(index)];
    if (now == kNever) return ops_left_ == 0;
    RankState& rank = ranks_[at(index)];
    finish(rank);
    double next = held_until(index, now);
    if (next <= now) {
      const double urgent = rank.urgent_left > 0.5 * kTolerance ? rank.urgent_left + tail_[at(index)] : 0.0;
      if (now + std::max(rank.work_left, urgent) > cutoff) return false;
      next = kNever;
      if (const auto choice = preferred(index, now, next)) next = start(index, *choice, now);
    }
    set_time(index, next);
  }
}

void ListScheduler::reset() {
  std::fill(stages_.begin(), stages_.end(), StageState{});
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    ranks_[rank] = {false, Kind::F, 0, 0.0, work_[rank], urgent_[rank]};
    sequences_[rank].clear();
  }
  for (Edge& edge : forward_) edge.free = 0.0;
  for (Edge& edge : backward_) edge.free = 0.0;
  std::fill(forward_due_.begin(), forward_due_.end(), kNever);
  std::fill_n(forward_due_.begin(), problem_.microbatches, 0.0);
  std::fill(gradient_due_.begin(), gradient_due_.end(), kNever);
  std::fill(holds_.begin(), holds_.end(), Hold{kNever, 0.0});
  ops_left_ = static_cast<std::int64_t>(3) * stages_count_ * problem_.microbatches;
  std::fill_n(time_.begin(), problem_.workers, 0.0);
  for (std::int32_t node = leaves_ - 1; node > 0; --node) {
    const std::int32_t left = first_[at(2 * node)], right = first_[at(2 * node + 1)];
    first_[at(node)] = time_[at(left)] <= time_[at(right)] ? left : right;
  }
}

void ListScheduler::set_time(std::int32_t rank, double time) {
  time_[at(rank)] = time;
  for (std::int32_t node = (leaves_ + rank) / 2; node > 0; node /= 2) {
    const std::int32_t left = first_[at(2 * node)], right = first_[at(2 * node + 1)];
    first_[at(node)] = time_[at(left)] <= time_[at(right)] ? left : right;
  }
}

// Ends the op that ran: frees the memory that it gives back.
void ListScheduler::finish(RankState& rank) {
  if (!rank.running) return;
  rank.running = false;
  const std::size_t s = at(rank.stage);
  switch (rank.kind) {
    case Kind::F: return;
    case Kind::I:
      rank.memory -= cost_.memory_input_grad[s];
      --stages_[s].in_flight;
      return;
    case Kind::W: rank.memory -= cost_.memory_forward[s] - cost_.memory_input_grad[s]; return;
    default: return;  // never dispatched
  }
}

double ListScheduler::held_until(std::int32_t rank, double now) const {
  double until = 0.0;
  if (holds_.empty()) return until;
  for (const std::int32_t stage : stages_of_[at(rank)]) {
    for (const Hold& hold : {holds_[2 * at(stage)], holds_[2 * at(stage) + 1]})
      if (hold.from <= now) until = std::max(until, hold.until);
  }
  return until;
}

bool ListScheduler::forward_allowed(std::int32_t rank, std::int32_t stage) const {
  const StageState& state = stages_[at(stage)];
  return state.forwards < problem_.microbatches && state.in_flight < policy_->stages[at(stage)].in_flight &&
         ranks_[at(rank)].memory + cost_.memory_forward[at(stage)] <= limit_[at(rank)];
}

// Chooses the op that a free rank starts, if any. `wake` is when the next input is due.
std::optional<ListScheduler::Choice> ListScheduler::preferred(std::int32_t rank, double now, double& wake) const {
  std::int32_t gradient_stage = -1, forward_stage = -1, weight_stage = -1;
  double gradient_due = kNever, forward_due = kNever;
  for (const std::int32_t stage : stages_of_[at(rank)]) {
    const StageState& state = stages_[at(stage)];
    const std::size_t row = at(stage) * at(problem_.microbatches);
    if (state.input_grads < problem_.microbatches) {
      const double due = gradient_due_[row + at(state.input_grads)];
      if (due > now) {
        gradient_due = std::min(gradient_due, due);
      } else if (gradient_stage < 0) {
        gradient_stage = stage;
      }
    }
    if (forward_allowed(rank, stage)) {
      const double due = forward_due_[row + at(state.forwards)];
      if (due > now) {
        forward_due = std::min(forward_due, due);
      } else if (forward_stage < 0 || !policy_->deep_first) {
        forward_stage = stage;
      }
    }
    if (weight_stage < 0 && state.weight_grads < state.input_grads) weight_stage = stage;
  }
  wake = std::min(gradient_due, forward_due);
  if (gradient_stage >= 0) {
    const StageState& state = stages_[at(gradient_stage)];
    const bool warming_up = state.input_grads == 0 && state.forwards < policy_->stages[at(gradient_stage)].warm_up;
    if (!warming_up || forward_stage != gradient_stage) return Choice{gradient_stage, Kind::I};
  }
  const bool overdue = weight_stage >= 0 && stages_[at(weight_stage)].input_grads - stages_[at(weight_stage)].weight_grads >
                                                policy_->stages[at(weight_stage)].backlog;
  if (forward_stage >= 0 && !overdue) {
    const double patience = policy_->stages[at(forward_stage)].patience_forward;
    if (gradient_stage >= 0 || patience == 0.0 || gradient_due >= now + patience * cost_.forward[at(forward_stage)])
      return Choice{forward_stage, Kind::F};
    return std::nullopt;
  }
  if (weight_stage >= 0) {
    const double patience = policy_->stages[at(weight_stage)].patience_weight;
    if (patience == 0.0 || wake >= now + patience * cost_.weight_grad[at(weight_stage)]) return Choice{weight_stage, Kind::W};
  }
  return std::nullopt;
}

// Starts an op. Returns when its rank is free again.
double ListScheduler::start(std::int32_t index, Choice choice, double now) {
  RankState& rank = ranks_[at(index)];
  StageState& state = stages_[at(choice.stage)];
  const double duration = cost_.duration(choice.stage, choice.kind);
  const double end = now + duration;
  rank.running = true;
  rank.kind = choice.kind;
  rank.stage = choice.stage;
  rank.work_left -= duration;
  --ops_left_;
  sequences_[at(index)].push_back(code_of(choice.stage, choice.kind));
  switch (choice.kind) {
    case Kind::F: {
      const std::int32_t microbatch = state.forwards++;
      ++state.in_flight;
      rank.memory += cost_.memory_forward[at(choice.stage)];
      rank.urgent_left -= duration;
      if (choice.stage + 1 < stages_count_) return send(choice.stage, true, microbatch, now, end);
      gradient_due_[at(choice.stage) * at(problem_.microbatches) + at(microbatch)] = end;
      return end;
    }
    case Kind::I: {
      const std::int32_t microbatch = state.input_grads++;
      rank.urgent_left -= duration;
      return choice.stage > 0 ? send(choice.stage, false, microbatch, now, end) : end;
    }
    case Kind::W: ++state.weight_grads; return end;
    default: return end;  // never dispatched
  }
  return end;  // unreachable; GCC does not see that the switch is complete
}

// Sends the output of an op that ends at `end`. Returns when the sender is free again.
double ListScheduler::send(std::int32_t stage, bool forward, std::int32_t microbatch, double now, double end) {
  const std::int32_t receiver = forward ? stage + 1 : stage - 1;
  const std::size_t index = at(std::min(stage, receiver));
  const Edge& costs = (forward ? forward_ : backward_)[index];
  double& free = (forward || cost_.half_duplex ? forward_ : backward_)[index].free;
  free = std::max(end, free) + costs.occupancy;
  const double arrives = free + costs.latency;
  (forward ? forward_due_ : gradient_due_)[at(receiver) * at(problem_.microbatches) + at(microbatch)] = arrives;
  const std::int32_t rank = problem_.placement[at(receiver)];
  if (!ranks_[at(rank)].running && arrives < time_[at(rank)]) set_time(rank, std::max(arrives, now));
  switch (cost_.blocking) {
    case Blocking::None: return end;
    case Blocking::Send: return arrives;
    case Blocking::Both: holds_[2 * at(receiver) + (forward ? 0 : 1)] = {end, arrives}; return arrives;
  }
  return end;  // unreachable; GCC does not see that the switch is complete
}

}  // namespace adaptra::schedule
