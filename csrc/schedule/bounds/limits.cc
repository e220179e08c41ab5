#include "schedule/bounds/limits.h"

#include "schedule/simulate/constants.h"

namespace adaptra::schedule {
Limits::Limits(const Problem& problem, const std::vector<std::int32_t>& in_flight)
    : problem_(problem),
      in_flight_(in_flight),
      stages_(at(problem.workers)),
      limit_(at(problem.workers), kNever),
      counts_(problem.placement.size()) {
  for (std::size_t s = 0; s < problem.placement.size(); ++s)
    stages_[at(problem.placement[s])].push_back(static_cast<std::int32_t>(s));
  for (std::size_t rank = 0; rank < problem.cost.memory_limit.size(); ++rank)
    limit_[rank] = problem.cost.memory_limit[rank] + kTolerance;
}

bool Limits::repair(std::size_t rank, Sequence& sequence) {
  const Cost& cost = problem_.cost;
  for (const std::int32_t stage : stages_[rank]) counts_[at(stage)] = {};
  repaired_.clear();
  double held = 0.0;
  for (const std::int32_t code : sequence) {
    const std::int32_t stage = stage_of(code);
    const std::size_t s = at(stage);
    Counts& count = counts_[s];
    switch (kind_of(code)) {
      case Kind::F:
        if (count.forwards - count.input_grads >= in_flight_[s]) return false;
        while (held + cost.memory_forward[s] > limit_[rank])
          if (!run_weight_grad(rank, held)) return false;
        held += cost.memory_forward[s];
        ++count.forwards;
        repaired_.push_back(code);
        break;
      case Kind::I:
        if (count.input_grads == count.forwards) return false;
        held -= cost.memory_input_grad[s];
        ++count.input_grads;
        repaired_.push_back(code);
        if (count.late > 0) {
          --count.late;
          ++count.weight_grads;
          held -= cost.memory_forward[s] - cost.memory_input_grad[s];
          repaired_.push_back(code_of(stage, Kind::W));
        }
        break;
      case Kind::W:
        if (count.early > 0) {
          --count.early;
        } else if (count.weight_grads == count.input_grads) {
          ++count.late;
        } else {
          ++count.weight_grads;
          held -= cost.memory_forward[s] - cost.memory_input_grad[s];
          repaired_.push_back(code);
        }
        break;
      default: return false;  // never in a sequence
    }
  }
  sequence.swap(repaired_);
  return true;
}

bool Limits::hold(const std::vector<Sequence>& sequences) {
  const Cost& cost = problem_.cost;
  for (std::size_t rank = 0; rank < sequences.size(); ++rank) {
    for (const std::int32_t stage : stages_[rank]) counts_[at(stage)] = {};
    double held = 0.0;
    for (const std::int32_t code : sequences[rank]) {
      const std::size_t s = at(stage_of(code));
      Counts& count = counts_[s];
      switch (kind_of(code)) {
        case Kind::F:
          held += cost.memory_forward[s];
          if (count.forwards++ - count.input_grads >= in_flight_[s] || held > limit_[rank]) return false;
          break;
        case Kind::I:
          held -= cost.memory_input_grad[s];
          ++count.input_grads;
          break;
        case Kind::W: held -= cost.memory_forward[s] - cost.memory_input_grad[s]; break;
        default: return false;  // never in a sequence
      }
    }
  }
  return true;
}

bool Limits::admits(std::size_t rank, const Sequence& sequence) {
  for (const std::int32_t stage : stages_[rank]) counts_[at(stage)] = {};
  double held = 0.0;
  for (const std::int32_t code : sequence) {
    const std::size_t s = at(stage_of(code));
    Counts& count = counts_[s];
    if (kind_of(code) == Kind::F) {
      held += problem_.cost.memory_forward[s];
      if (count.forwards++ - count.input_grads >= in_flight_[s] || held > limit_[rank]) return false;
    } else {
      held -= problem_.cost.memory_forward[s];
      if (count.input_grads++ == count.forwards) return false;
    }
  }
  return true;
}

// Runs a W now, ahead of its place. False when no W can run.
bool Limits::run_weight_grad(std::size_t rank, double& held) {
  for (const std::int32_t stage : stages_[rank]) {
    Counts& count = counts_[at(stage)];
    if (count.weight_grads == count.input_grads) continue;
    ++count.weight_grads;
    ++count.early;
    held -= problem_.cost.memory_forward[at(stage)] - problem_.cost.memory_input_grad[at(stage)];
    repaired_.push_back(code_of(stage, Kind::W));
    return true;
  }
  return false;
}

}  // namespace adaptra::schedule
