#include "schedule/bounds/fit_memory.h"

#include <algorithm>

#include "schedule/simulate/constants.h"

namespace adaptra::schedule {

bool FitMemory::fit(const Sequence& sequence, double limit, bool weight_grads_first, Sequence& fitted) {
  std::fill(counts_.begin(), counts_.end(), Counts{});
  fitted.clear();
  waiting_.clear();
  next_ = 0;
  held_ = 0.0;
  limit_ = limit + kTolerance * (1.0 + limit);
  if (!sequence.empty()) rank_ = problem_.placement[at(stage_of(sequence.front()))];
  for (const std::int32_t code : sequence) {
    const std::int32_t stage = stage_of(code);
    Counts& count = counts_[at(stage)];
    switch (kind_of(code)) {
      case Kind::F:
        waiting_.push_back(stage);
        while (weight_grads_first && !has_room(waiting_[next_]) && run_weight_grad(fitted)) {
        }
        run_waiting(fitted);
        break;
      case Kind::I:
        while (count.forwards == count.input_grads) {
          if (next_ == waiting_.size()) return false;
          while (!has_room(waiting_[next_]))
            if (!run_weight_grad(fitted)) return false;
          run_forward(waiting_[next_++], fitted);
        }
        ++count.input_grads;
        held_ -= problem_.cost.memory_input_grad[at(stage)];
        fitted.push_back(code);
        run_waiting(fitted);
        break;
      case Kind::W:
        if (count.early > 0) {
          --count.early;
          break;
        }
        ++count.weight_grads;
        held_ -= problem_.cost.memory_forward[at(stage)] - problem_.cost.memory_input_grad[at(stage)];
        fitted.push_back(code);
        run_waiting(fitted);
        break;
      default: return false;  // never in a sequence
    }
  }
  return next_ == waiting_.size();
}

bool FitMemory::has_room(std::int32_t stage) const { return held_ + problem_.cost.memory_forward[at(stage)] <= limit_; }

void FitMemory::run_forward(std::int32_t stage, Sequence& fitted) {
  held_ += problem_.cost.memory_forward[at(stage)];
  ++counts_[at(stage)].forwards;
  fitted.push_back(code_of(stage, Kind::F));
}

void FitMemory::run_waiting(Sequence& fitted) {
  while (next_ < waiting_.size() && has_room(waiting_[next_])) run_forward(waiting_[next_++], fitted);
}

// Runs a W now, ahead of its place. False when no W can run.
bool FitMemory::run_weight_grad(Sequence& fitted) {
  for (std::size_t s = 0; s < counts_.size(); ++s) {
    Counts& count = counts_[s];
    if (problem_.placement[s] != rank_ || count.weight_grads == count.input_grads) continue;
    ++count.weight_grads;
    ++count.early;
    held_ -= problem_.cost.memory_forward[s] - problem_.cost.memory_input_grad[s];
    fitted.push_back(code_of(static_cast<std::int32_t>(s), Kind::W));
    return true;
  }
  return false;
}

}  // namespace adaptra::schedule
