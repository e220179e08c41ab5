// The FastSimulator for problems in which messages hold their receivers.
#include <algorithm>

#include "schedule/evaluate/fast_simulator.h"
#include "schedule/simulate/constants.h"

namespace adaptra::schedule {
// Simulates in time order. Where a message holds its receiver, ranks can't run ahead: each depends on what the others do at
// that moment. Messages never queue here, as a sender begins nothing before its message has arrived.
double FastSimulator::run_in_time_order(const std::vector<Sequence>& sequences, double cutoff) {
  std::fill(forwards_.begin(), forwards_.end(), 0U);
  std::fill(gradients_.begin(), gradients_.end(), 0U);
  std::uint32_t first_record = 0;
  std::size_t unfinished = 0;
  for (std::size_t rank = 0; rank < held_ranks_.size(); ++rank) {
    held_ranks_[rank] = {0, first_record, 0, false, 0.0, 0.0, ranks_[rank].work};
    ranks_[rank].first_record = first_record;
    first_record += static_cast<std::uint32_t>(sequences[rank].size());
    if (!sequences[rank].empty()) ++unfinished;
  }
  double now = 0.0;
  while (true) {
    double next = kNever;
    for (std::size_t rank = 0; rank < held_ranks_.size(); ++rank) {
      HeldRank& state = held_ranks_[rank];
      if (!state.running && state.held_until <= now && state.position < sequences[rank].size()) {
        if (now + state.work_left > cutoff) return kNever;
        begin(rank, sequences[rank], now);
      }
      if (state.running) {
        next = std::min(next, state.end);
      } else if (state.position < sequences[rank].size()) {
        std::uint32_t producer = 0;
        const double there = std::max(state.held_until, input_there(sequences[rank][state.position], producer));
        if (there > now) next = std::min(next, there);
      }
    }
    if (next == kNever) return unfinished == 0 ? now : kNever;
    now = next;
    for (std::size_t rank = 0; rank < held_ranks_.size(); ++rank) {
      HeldRank& state = held_ranks_[rank];
      if (!state.running || state.end > now) continue;
      end(rank, sequences[rank], now);
      if (state.position == sequences[rank].size()) --unfinished;
    }
  }
}

// Returns when the input of an op is there, and says which op sent it. Infinity while it has not been sent.
double FastSimulator::input_there(std::int32_t code, std::uint32_t& producer) const {
  const std::size_t s = at(stage_of(code));
  switch (kind_of(code)) {
    case Kind::F:
      if (s == 0) return 0.0;
      if (forwards_[s] >= forwards_[s - 1]) return kNever;
      producer = trace_.forward_record[(s - 1) * microbatches_ + forwards_[s]];
      return trace_.forward_there[s * microbatches_ + forwards_[s]];
    case Kind::I:
      if (s + 1 == stages_) return 0.0;
      if (gradients_[s] >= gradients_[s + 1]) return kNever;
      producer = trace_.gradient_record[(s + 1) * microbatches_ + gradients_[s]];
      return trace_.gradient_there[s * microbatches_ + gradients_[s]];
    default: return 0.0;
  }
}

bool FastSimulator::begin(std::size_t rank, const Sequence& sequence, double now) {
  HeldRank& state = held_ranks_[rank];
  const std::int32_t code = sequence[state.position];
  const std::uint32_t record = state.first_record + state.position;
  std::uint32_t producer = record;
  const double there = input_there(code, producer);
  if (there > now) return false;
  const double duration = cost_.duration(stage_of(code), kind_of(code));
  const bool gapless = state.position > 0 && trace_.times[record - 1].end >= now;
  causes_[record] = gapless ? record - 1 : state.held_until >= now && now > 0.0 ? state.held_by : producer;
  trace_.times[record] = {now, now + duration, now + duration};
  state.running = true;
  state.end = now + duration;
  state.work_left -= duration;
  return true;
}

void FastSimulator::end(std::size_t rank, const Sequence& sequence, double now) {
  HeldRank& state = held_ranks_[rank];
  const std::int32_t code = sequence[state.position];
  const std::uint32_t record = state.first_record + state.position;
  const std::size_t s = at(stage_of(code));
  state.running = false;
  ++state.position;
  std::size_t receiver = s;
  const bool forward = kind_of(code) == Kind::F;
  switch (kind_of(code)) {
    case Kind::F: trace_.forward_record[s * microbatches_ + forwards_[s]] = record; break;
    case Kind::I: trace_.gradient_record[s * microbatches_ + gradients_[s]] = record; break;
    default: return;
  }
  const std::size_t m = forward ? forwards_[s]++ : gradients_[s]++;
  if (forward ? s + 1 == stages_ : s == 0) return;
  receiver = forward ? s + 1 : s - 1;
  const Directed& edge = forward ? forward_[s] : backward_[s - 1];
  const double arrives = now + edge.occupancy + edge.latency;
  (forward ? trace_.forward_there : trace_.gradient_there)[receiver * microbatches_ + m] = arrives;
  for (const std::size_t stage : {s, receiver}) {
    HeldRank& held = held_ranks_[at(problem_.placement[stage])];
    if (arrives <= held.held_until) continue;
    held.held_until = arrives;
    held.held_by = record;
  }
}

}  // namespace adaptra::schedule
