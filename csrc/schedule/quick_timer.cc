#include "schedule/quick_timer.h"

#include <algorithm>
#include <limits>

namespace adaptra::schedule {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kTolerance = 1e-9;

std::size_t at(std::int32_t index) { return static_cast<std::size_t>(index); }

}  // namespace

std::vector<Sequence> to_sequences(const std::vector<Order>& orders) {
  std::vector<Sequence> sequences(orders.size());
  for (std::size_t rank = 0; rank < orders.size(); ++rank) {
    sequences[rank].reserve(orders[rank].size());
    for (const Op& op : orders[rank]) sequences[rank].push_back(code_of(op.stage, op.kind));
  }
  return sequences;
}

std::vector<Order> to_orders(const std::vector<Sequence>& sequences, std::int32_t stages) {
  std::vector<std::int32_t> next(4 * at(stages), 0);
  std::vector<Order> orders(sequences.size());
  for (std::size_t rank = 0; rank < sequences.size(); ++rank) {
    orders[rank].reserve(sequences[rank].size());
    for (const std::int32_t code : sequences[rank]) orders[rank].push_back({stage_of(code), kind_of(code), next[at(code)]++});
  }
  return orders;
}

QuickTimer::QuickTimer(const Problem& problem)
    : cost_(problem.cost),
      problem_(problem),
      stages_(problem.cost.forward.size()),
      microbatches_(at(problem.microbatches)),
      sender_waits_(problem.cost.blocking == Blocking::Send),
      receiver_waits_(problem.cost.blocking == Blocking::Both),
      forward_there_(stages_ * microbatches_, 0.0),
      gradient_there_(stages_ * microbatches_, 0.0),
      forward_record_(stages_ * microbatches_, 0),
      gradient_record_(stages_ * microbatches_, 0),
      forwards_(stages_, 0),
      gradients_(stages_, 0),
      ranks_(at(problem.ranks)),
      times_(3 * stages_ * microbatches_),
      held_ranks_(receiver_waits_ ? ranks_.size() : 0),
      causes_(receiver_waits_ ? times_.size() : 0, 0) {
  for (std::size_t edge = 0; edge + 1 < stages_; ++edge) {
    forward_.push_back({cost_.occupancy_forward[edge], cost_.latency_forward[edge], 0.0});
    backward_.push_back({cost_.occupancy_backward[edge], cost_.latency_backward[edge], 0.0});
  }
  for (RankState& rank : ranks_) rank.work = 0.0;
  for (std::size_t s = 0; s < stages_; ++s) {
    ranks_[at(problem.placement[s])].work +=
        static_cast<double>(microbatches_) * (cost_.forward[s] + cost_.input_grad[s] + cost_.weight_grad[s]);
  }
}

double QuickTimer::makespan(const std::vector<Sequence>& sequences, double cutoff) {
  if (receiver_waits_) return run_in_time_order(sequences, cutoff);
  for (Directed& edge : forward_) edge.free = 0.0;
  for (Directed& edge : backward_) edge.free = 0.0;
  std::fill(forwards_.begin(), forwards_.end(), 0U);
  std::fill(gradients_.begin(), gradients_.end(), 0U);
  runnable_.clear();
  std::size_t first_record = 0;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    ranks_[rank] = {0, first_record, 0.0, ranks_[rank].work, 0.0, true};
    first_record += sequences[rank].size();
  }
  for (std::size_t rank = ranks_.size(); rank-- > 0;) runnable_.push_back(rank);
  while (!runnable_.empty()) {
    const std::size_t rank = runnable_.back();
    runnable_.pop_back();
    ranks_[rank].queued = false;
    if (!run_ahead(rank, sequences[rank], cutoff)) return kNever;
  }
  double makespan = 0.0;
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    const RankState& state = ranks_[rank];
    if (state.position < sequences[rank].size()) return kNever;
    if (state.position > 0) makespan = std::max(makespan, times_[state.first_record + state.position - 1].end);
  }
  return makespan;
}

// Runs a rank's ops until an input is missing. False when the rank can't end by the cutoff.
bool QuickTimer::run_ahead(std::size_t rank, const Sequence& sequence, double cutoff) {
  RankState& state = ranks_[rank];
  const double most_idle = cutoff - state.work;
  double now = state.now;
  std::size_t position = state.position;
  Times* const times = times_.data() + state.first_record;
  for (; position < sequence.size(); ++position) {
    const std::int32_t code = sequence[position];
    const std::size_t s = at(stage_of(code));
    double start = now, end = now, released = now;
    const auto wait_for = [&](double there) {
      if (there <= now) return;
      state.idle += there - now;
      start = there;
    };
    switch (kind_of(code)) {
      case Kind::F: {
        const std::size_t m = forwards_[s];
        if (s > 0) {
          if (m >= forwards_[s - 1]) {
            state.now = now;
            state.position = position;
            return true;
          }
          wait_for(forward_there_[s * microbatches_ + m]);
        }
        ++forwards_[s];
        end = released = start + cost_.forward[s];
        forward_record_[s * microbatches_ + m] = static_cast<std::uint32_t>(state.first_record + position);
        if (s + 1 < stages_) {
          Directed& edge = forward_[s];
          edge.free = std::max(end, edge.free) + edge.occupancy;
          forward_there_[(s + 1) * microbatches_ + m] = edge.free + edge.latency;
          if (sender_waits_) released = edge.free + edge.latency;
          wake(static_cast<std::int32_t>(s + 1), rank);
        }
        break;
      }
      case Kind::I: {
        const std::size_t m = gradients_[s];
        if (s + 1 < stages_) {
          if (m >= gradients_[s + 1]) {
            state.now = now;
            state.position = position;
            return true;
          }
          wait_for(gradient_there_[s * microbatches_ + m]);
        }
        ++gradients_[s];
        end = released = start + cost_.input_grad[s];
        gradient_record_[s * microbatches_ + m] = static_cast<std::uint32_t>(state.first_record + position);
        if (s > 0) {
          Directed& edge = backward_[s - 1];
          edge.free = std::max(end, edge.free) + edge.occupancy;
          gradient_there_[(s - 1) * microbatches_ + m] = edge.free + edge.latency;
          if (sender_waits_) released = edge.free + edge.latency;
          wake(static_cast<std::int32_t>(s - 1), rank);
        }
        break;
      }
      case Kind::W: end = released = start + cost_.weight_grad[s]; break;
      case Kind::B: return false;  // never in a sequence
    }
    if (state.idle > most_idle) return false;
    times[position] = {start, end, released};
    now = released;
  }
  state.now = now;
  state.position = position;
  return true;
}

void QuickTimer::wake(std::int32_t stage, std::size_t by) {
  const std::size_t rank = at(problem_.placement[at(stage)]);
  if (rank == by || ranks_[rank].queued) return;
  ranks_[rank].queued = true;
  runnable_.push_back(rank);
}

// Where a message holds its receiver, ranks can't run ahead: what a rank may begin depends on what the others do at that
// moment. Messages never queue here, as a sender begins nothing before its message has arrived.
double QuickTimer::run_in_time_order(const std::vector<Sequence>& sequences, double cutoff) {
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

// When the input of an op is there, and which op sent it; infinity while it has not been sent.
double QuickTimer::input_there(std::int32_t code, std::uint32_t& producer) const {
  const std::size_t s = at(stage_of(code));
  switch (kind_of(code)) {
    case Kind::F:
      if (s == 0) return 0.0;
      if (forwards_[s] >= forwards_[s - 1]) return kNever;
      producer = forward_record_[(s - 1) * microbatches_ + forwards_[s]];
      return forward_there_[s * microbatches_ + forwards_[s]];
    case Kind::I:
      if (s + 1 == stages_) return 0.0;
      if (gradients_[s] >= gradients_[s + 1]) return kNever;
      producer = gradient_record_[(s + 1) * microbatches_ + gradients_[s]];
      return gradient_there_[s * microbatches_ + gradients_[s]];
    case Kind::W:
    case Kind::B: return 0.0;
  }
  return 0.0;  // unreachable; GCC does not see that the switch is complete
}

bool QuickTimer::begin(std::size_t rank, const Sequence& sequence, double now) {
  HeldRank& state = held_ranks_[rank];
  const std::int32_t code = sequence[state.position];
  const std::uint32_t record = state.first_record + state.position;
  std::uint32_t producer = record;
  const double there = input_there(code, producer);
  if (there > now) return false;
  const double duration = cost_.duration(stage_of(code), kind_of(code));
  const bool gapless = state.position > 0 && times_[record - 1].end >= now;
  causes_[record] = gapless ? record - 1 : state.held_until >= now && now > 0.0 ? state.held_by : producer;
  times_[record] = {now, now + duration, now + duration};
  state.running = true;
  state.end = now + duration;
  state.work_left -= duration;
  return true;
}

void QuickTimer::end(std::size_t rank, const Sequence& sequence, double now) {
  HeldRank& state = held_ranks_[rank];
  const std::int32_t code = sequence[state.position];
  const std::uint32_t record = state.first_record + state.position;
  const std::size_t s = at(stage_of(code));
  state.running = false;
  ++state.position;
  std::size_t receiver = s;
  const bool forward = kind_of(code) == Kind::F;
  switch (kind_of(code)) {
    case Kind::F: forward_record_[s * microbatches_ + forwards_[s]] = record; break;
    case Kind::I: gradient_record_[s * microbatches_ + gradients_[s]] = record; break;
    case Kind::W:
    case Kind::B: return;
  }
  const std::size_t m = forward ? forwards_[s]++ : gradients_[s]++;
  if (forward ? s + 1 == stages_ : s == 0) return;
  receiver = forward ? s + 1 : s - 1;
  const Directed& edge = forward ? forward_[s] : backward_[s - 1];
  const double arrives = now + edge.occupancy + edge.latency;
  (forward ? forward_there_ : gradient_there_)[receiver * microbatches_ + m] = arrives;
  for (const std::size_t stage : {s, receiver}) {
    HeldRank& held = held_ranks_[at(problem_.placement[stage])];
    if (arrives <= held.held_until) continue;
    held.held_until = arrives;
    held.held_by = record;
  }
}

// The op whose end, or whose message, let the op at `record` begin; that op itself when it began with the step.
std::size_t QuickTimer::record_before(const std::vector<Sequence>& sequences, std::size_t rank, std::size_t record) const {
  const std::size_t base = ranks_[rank].first_record;
  if (times_[record].start <= 0.0) return record;
  if (receiver_waits_) return causes_[record];
  if (record > base && times_[record - 1].released >= times_[record].start) return record - 1;
  const std::int32_t code = sequences[rank][record - base];
  const std::size_t s = at(stage_of(code));
  const bool forward = kind_of(code) == Kind::F;
  if (kind_of(code) == Kind::W || (forward ? s == 0 : s + 1 == stages_)) return record;
  const std::size_t producer = forward ? s - 1 : s + 1;
  const auto& records = forward ? forward_record_ : gradient_record_;
  const auto& there = forward ? forward_there_ : gradient_there_;
  const Directed& edge = forward ? forward_[s - 1] : backward_[s];
  const auto row = records.begin() + static_cast<std::ptrdiff_t>(s * microbatches_);
  const auto here = std::lower_bound(row, row + static_cast<std::ptrdiff_t>(microbatches_), static_cast<std::uint32_t>(record));
  auto m = static_cast<std::size_t>(here - row);
  // A message that queued was held up by the one before it.
  while (m > 0 && times_[records[producer * microbatches_ + m]].end + edge.occupancy + edge.latency + kTolerance <
                      there[s * microbatches_ + m])
    --m;
  return records[producer * microbatches_ + m];
}

void QuickTimer::critical_blocks(const std::vector<Sequence>& sequences, std::vector<Block>& blocks) const {
  blocks.clear();
  std::size_t rank = 0;
  double latest = -1.0;
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    if (sequences[r].empty()) continue;
    const double end = times_[ranks_[r].first_record + sequences[r].size() - 1].end;
    if (end > latest) {
      latest = end;
      rank = r;
    }
  }
  std::size_t record = ranks_[rank].first_record + sequences[rank].size() - 1;
  blocks.push_back({rank, sequences[rank].size() - 1, sequences[rank].size() - 1});
  while (true) {
    const std::size_t before = record_before(sequences, rank, record);
    if (before == record) return;
    const bool here = before + 1 == record && record > ranks_[rank].first_record;
    if (!here) {
      rank = 0;
      while (rank + 1 < ranks_.size() && ranks_[rank + 1].first_record <= before) ++rank;
      blocks.push_back({rank, 0, before - ranks_[rank].first_record});
    }
    record = before;
    blocks.back().first = record - ranks_[rank].first_record;
  }
}

}  // namespace adaptra::schedule
