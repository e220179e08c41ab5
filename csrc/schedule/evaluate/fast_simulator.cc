#include "schedule/evaluate/fast_simulator.h"

#include <algorithm>

#include "schedule/bounds/bounds.h"
#include "schedule/simulate/constants.h"
#include "schedule/simulate/links.h"

namespace adaptra::schedule {
namespace {

using Numbers = std::vector<double>;

}  // namespace

FastSimulator::FastSimulator(const Problem& problem)
    : cost_(problem.cost),
      problem_(problem),
      stages_(problem.cost.forward.size()),
      microbatches_(at(problem.microbatches)),
      sender_waits_(problem.cost.blocking == Blocking::Send),
      receiver_waits_(problem.cost.blocking == Blocking::Both),
      trace_{std::vector<Times>(3 * stages_ * microbatches_),
             Numbers(stages_ * microbatches_),
             Numbers(stages_ * microbatches_),
             Numbers(stages_ * microbatches_),
             Numbers(stages_ * microbatches_),
             std::vector<std::uint32_t>(stages_ * microbatches_),
             std::vector<std::uint32_t>(stages_ * microbatches_)},
      forwards_(stages_, 0),
      gradients_(stages_, 0),
      weight_grads_(stages_, 0),
      stages_of_(at(problem.workers)),
      memory_limit_(at(problem.workers), kNever),
      urgent_work_(at(problem.workers), 0.0),
      tail_(least_tails(problem)),
      ranks_(at(problem.workers)),
      held_ranks_(receiver_waits_ ? ranks_.size() : 0),
      causes_(receiver_waits_ ? trace_.times.size() : 0, 0) {
  Links links;
  for (std::size_t edge = 0; edge + 1 < stages_; ++edge) {
    const std::int32_t rank = problem.placement[edge], next = problem.placement[edge + 1];
    forward_.push_back({cost_.occupancy_forward[edge], cost_.latency_forward[edge], links.of(rank, next)});
    backward_.push_back({cost_.occupancy_backward[edge], cost_.latency_backward[edge], links.of(next, rank)});
  }
  link_free_.assign(links.size(), 0.0);
  for (RankState& rank : ranks_) rank.work = 0.0;
  for (std::size_t rank = 0; rank < problem.cost.memory_limit.size(); ++rank)
    memory_limit_[rank] = problem.cost.memory_limit[rank] + kTolerance;
  for (std::size_t s = 0; s < stages_; ++s) {
    const std::size_t rank = at(problem.placement[s]);
    stages_of_[rank].push_back(s);
    urgent_work_[rank] += static_cast<double>(microbatches_) * (cost_.forward[s] + cost_.input_grad[s]);
    ranks_[at(problem.placement[s])].work +=
        static_cast<double>(microbatches_) * (cost_.forward[s] + cost_.input_grad[s] + cost_.weight_grad[s]);
  }
  std::size_t records = 0;
  for (const std::vector<std::size_t>& stages : stages_of_) {
    first_record_.push_back(records);
    records += 3 * microbatches_ * stages.size();
  }
}

double FastSimulator::makespan(const std::vector<Sequence>& sequences, double cutoff, double since) {
  return receiver_waits_ ? run_in_time_order(sequences, cutoff) : run<false>(sequences, cutoff, since);
}

double FastSimulator::fill(const std::vector<Sequence>& orders, const std::vector<float>& patience, double cutoff,
                           double since) {
  filled_.resize(orders.size());
  patience_ = &patience;
  return run<true>(orders, cutoff, since);
}

void FastSimulator::keep() {
  std::swap(trace_, kept_);
  if (trace_.times.empty()) trace_ = kept_;
  kept_filled_ = filled_;
}

double FastSimulator::decided_at(std::size_t rank, std::size_t position) const {
  // Times alone don't tell idle time where a message holds its sender, or its receiver: there all is timed again.
  if (sender_waits_ || receiver_waits_ || position == 0) return 0.0;
  std::size_t record = position - 1;
  if (!kept_filled_.empty()) {
    const Sequence& filled = kept_filled_[rank];
    record = 0;
    for (std::size_t left = position; kind_of(filled[record]) == Kind::W || --left > 0;) ++record;
  }
  return kept_.times[first_record_[rank] + record].released;
}

template <bool fills>
double FastSimulator::run(const std::vector<Sequence>& orders, double cutoff, double since) {
  std::fill(link_free_.begin(), link_free_.end(), 0.0);
  std::fill(forwards_.begin(), forwards_.end(), 0U);
  std::fill(gradients_.begin(), gradients_.end(), 0U);
  std::fill(weight_grads_.begin(), weight_grads_.end(), 0U);
  runnable_.clear();
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    ranks_[rank] = {0, first_record_[rank], 0.0, ranks_[rank].work, 0.0, true, 0.0, urgent_work_[rank]};
    if constexpr (fills) filled_[rank].clear();
    if (since > 0.0) resume<fills>(rank, orders[rank], since);
  }
  for (std::size_t rank = ranks_.size(); rank-- > 0;) runnable_.push_back(rank);
  while (!runnable_.empty()) {
    const std::size_t rank = runnable_.back();
    runnable_.pop_back();
    ranks_[rank].queued = false;
    if (!run_ahead<fills>(rank, orders[rank], cutoff)) return kNever;
  }
  double makespan = 0.0;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    const RankState& state = ranks_[rank];
    if (state.position < orders[rank].size()) return kNever;
    const std::size_t records = fills ? filled_[rank].size() : state.position;
    if (records > 0) makespan = std::max(makespan, trace_.times[state.first_record + records - 1].end);
  }
  return makespan;
}

// Copies from the step last kept the ops that a rank started before `since`: no later decision can change them. W that were
// filled in after the last of these F and I are decided on again.
template <bool fills>
void FastSimulator::resume(std::size_t rank, const Sequence& order, double since) {
  RankState& state = ranks_[rank];
  const Sequence& sequence = fills ? kept_filled_[rank] : order;
  const auto first = kept_.times.begin() + static_cast<std::ptrdiff_t>(state.first_record);
  const auto last = first + static_cast<std::ptrdiff_t>(sequence.size());
  const auto before = [](const Times& times, double time) { return times.start < time; };
  auto count = static_cast<std::size_t>(std::lower_bound(first, last, since, before) - first);
  if constexpr (fills) {
    while (count > 0 && kind_of(sequence[count - 1]) == Kind::W) --count;
  }
  if (count == 0) return;
  for (std::size_t position = 0; position < count; ++position) {
    const std::size_t s = at(stage_of(sequence[position]));
    switch (kind_of(sequence[position])) {
      case Kind::F: ++forwards_[s]; break;
      case Kind::I: ++gradients_[s]; break;
      case Kind::W: ++weight_grads_[s]; break;
      default: break;  // never in a sequence
    }
  }
  std::copy_n(first, count, trace_.times.begin() + static_cast<std::ptrdiff_t>(state.first_record));
  state.now = first[static_cast<std::ptrdiff_t>(count) - 1].released;
  state.idle = state.now;
  state.position = count;
  const auto take = [](const auto& from, auto& to, std::size_t index, std::size_t many) {
    const auto offset = static_cast<std::ptrdiff_t>(index);
    std::copy_n(from.begin() + offset, many, to.begin() + offset);
  };
  for (const std::size_t s : stages_of_[rank]) {
    const std::size_t forwards = forwards_[s], gradients = gradients_[s], row = s * microbatches_;
    const double urgent =
        static_cast<double>(forwards) * cost_.forward[s] + static_cast<double>(gradients) * cost_.input_grad[s];
    state.urgent_left -= urgent;
    state.idle -= urgent + weight_grads_[s] * cost_.weight_grad[s];
    if constexpr (fills) {
      state.position -= weight_grads_[s];
      state.held += static_cast<double>(forwards) * cost_.memory_forward[s] -
                    static_cast<double>(gradients) * cost_.memory_input_grad[s] -
                    weight_grads_[s] * (cost_.memory_forward[s] - cost_.memory_input_grad[s]);
    }
    take(kept_.forward_record, trace_.forward_record, row, forwards);
    take(kept_.gradient_record, trace_.gradient_record, row, gradients);
    if (s + 1 < stages_ && forwards > 0) {
      take(kept_.forward_there, trace_.forward_there, row + microbatches_, forwards);
      take(kept_.forward_free, trace_.forward_free, row, forwards);
      double& free = link_free_[forward_[s].link];
      free = std::max(free, kept_.forward_free[row + forwards - 1]);
    }
    if (s > 0 && gradients > 0) {
      take(kept_.gradient_there, trace_.gradient_there, row - microbatches_, gradients);
      take(kept_.gradient_free, trace_.gradient_free, row, gradients);
      double& free = link_free_[backward_[s - 1].link];
      free = std::max(free, kept_.gradient_free[row + gradients - 1]);
    }
  }
  if constexpr (fills) filled_[rank].assign(sequence.begin(), sequence.begin() + static_cast<std::ptrdiff_t>(count));
}

// Runs a rank's ops until an input is missing. False when the rank can't end by the cutoff, or has no room for an F.
template <bool fills>
bool FastSimulator::run_ahead(std::size_t rank, const Sequence& sequence, double cutoff) {
  RankState& state = ranks_[rank];
  const double most_idle = cutoff - state.work;
  const double last_urgent = cutoff - tail_[rank];
  double now = state.now, idle = state.idle, urgent_left = state.urgent_left;
  std::size_t position = state.position;
  Times* const times = trace_.times.data() + state.first_record;
  const auto record = [&] {
    if constexpr (fills) return filled_[rank].size();
    return position;
  };
  const auto pause = [&] {
    state.now = now;
    state.idle = idle;
    state.urgent_left = urgent_left;
    state.position = position;
  };
  for (; position < sequence.size(); ++position) {
    const std::int32_t code = sequence[position];
    const std::size_t s = at(stage_of(code));
    double start = now, end = now, released = now;
    const auto wait_for = [&](double there) {
      if constexpr (fills) {
        if (there > now) fill_gap(rank, there, now);
        start = now;
      }
      if (there <= now) return;
      idle += there - now;
      start = there;
    };
    switch (kind_of(code)) {
      case Kind::F: {
        const std::size_t m = forwards_[s];
        if (s > 0) {
          if (m >= forwards_[s - 1]) {
            pause();
            return true;
          }
        }
        if constexpr (fills) {
          if (!make_room(rank, s, now)) return false;
          start = now;
        }
        if (s > 0) wait_for(trace_.forward_there[s * microbatches_ + m]);
        ++forwards_[s];
        end = released = start + cost_.forward[s];
        urgent_left -= cost_.forward[s];
        trace_.forward_record[s * microbatches_ + m] = static_cast<std::uint32_t>(state.first_record + record());
        if (s + 1 < stages_) {
          const Directed& edge = forward_[s];
          const double free = link_free_[edge.link] = std::max(end, link_free_[edge.link]) + edge.occupancy;
          trace_.forward_there[(s + 1) * microbatches_ + m] = free + edge.latency;
          trace_.forward_free[s * microbatches_ + m] = free;
          if (sender_waits_) released = free + edge.latency;
          wake(static_cast<std::int32_t>(s + 1), rank);
        }
        break;
      }
      case Kind::I: {
        const std::size_t m = gradients_[s];
        if (s + 1 < stages_) {
          if (m >= gradients_[s + 1]) {
            pause();
            return true;
          }
          wait_for(trace_.gradient_there[s * microbatches_ + m]);
        }
        ++gradients_[s];
        if constexpr (fills) state.held -= cost_.memory_input_grad[s];
        end = released = start + cost_.input_grad[s];
        urgent_left -= cost_.input_grad[s];
        trace_.gradient_record[s * microbatches_ + m] = static_cast<std::uint32_t>(state.first_record + record());
        if (s > 0) {
          const Directed& edge = backward_[s - 1];
          const double free = link_free_[edge.link] = std::max(end, link_free_[edge.link]) + edge.occupancy;
          trace_.gradient_there[(s - 1) * microbatches_ + m] = free + edge.latency;
          trace_.gradient_free[s * microbatches_ + m] = free;
          if (sender_waits_) released = free + edge.latency;
          wake(static_cast<std::int32_t>(s - 1), rank);
        }
        break;
      }
      case Kind::W: end = released = start + cost_.weight_grad[s]; break;
      default: return false;  // never in a sequence
    }
    // F and I must end by last_urgent; W that follow the last of them may end later.
    const bool urgent = kind_of(code) != Kind::W || urgent_left > 0.5 * kTolerance;
    if (idle > most_idle || (urgent && end + urgent_left > last_urgent + kTolerance)) return false;
    times[record()] = {start, end, released};
    if constexpr (fills) filled_[rank].push_back(code);
    now = released;
  }
  if constexpr (fills) fill_gap(rank, kNever, now);
  pause();
  return true;
}

// Puts W into a gap while it is long enough for one.
void FastSimulator::fill_gap(std::size_t rank, double until, double& now) {
  for (bool filled = true; filled && now < until;) {
    filled = false;
    for (const std::size_t s : stages_of_[rank]) {
      if (weight_grads_[s] == gradients_[s]) continue;
      if (until - now + kTolerance < static_cast<double>((*patience_)[s]) * cost_.weight_grad[s]) continue;
      put_weight_grad(rank, s, now);
      filled = true;
      break;
    }
  }
}

// Runs W until the memory of an F on a stage is free, and takes it. False when that does not help.
bool FastSimulator::make_room(std::size_t rank, std::size_t stage, double& now) {
  RankState& state = ranks_[rank];
  while (state.held + cost_.memory_forward[stage] > memory_limit_[rank]) {
    const auto& stages = stages_of_[rank];
    const auto ready =
        std::find_if(stages.begin(), stages.end(), [&](std::size_t s) { return weight_grads_[s] < gradients_[s]; });
    if (ready == stages.end()) return false;
    put_weight_grad(rank, *ready, now);
  }
  state.held += cost_.memory_forward[stage];
  return true;
}

void FastSimulator::put_weight_grad(std::size_t rank, std::size_t stage, double& now) {
  Sequence& sequence = filled_[rank];
  const double end = now + cost_.weight_grad[stage];
  trace_.times[first_record_[rank] + sequence.size()] = {now, end, end};
  sequence.push_back(code_of(static_cast<std::int32_t>(stage), Kind::W));
  ++weight_grads_[stage];
  ranks_[rank].held -= cost_.memory_forward[stage] - cost_.memory_input_grad[stage];
  now = end;
}

void FastSimulator::wake(std::int32_t stage, std::size_t by) {
  const std::size_t rank = at(problem_.placement[at(stage)]);
  if (rank == by || ranks_[rank].queued) return;
  ranks_[rank].queued = true;
  runnable_.push_back(rank);
}

}  // namespace adaptra::schedule
