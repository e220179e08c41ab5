#include "schedule/replicas/period.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

namespace adaptra::schedule {
namespace {

struct Event {
  double time;
  std::int32_t node;
  std::int32_t step;
  bool operator>(const Event& other) const { return time != other.time ? time > other.time : node > other.node; }
};

}  // namespace

PeriodSimulator::PeriodSimulator(const Network& network, std::int32_t steps) : network_(network), steps_(steps) {
  const std::size_t workers = network.workers();
  for (Slot& slot : slots_) {
    slot.end.resize(network.nodes.size());
    slot.arrival.resize(network.transfers.size());
  }
  for (const std::vector<std::int32_t>& column : network.job.columns) reduces_ += column.size();
  next_waiting_.resize(workers);
  ends_.resize(workers * static_cast<std::size_t>(steps));
}

void PeriodSimulator::reset(Detail detail) {
  const std::size_t workers = network_.workers();
  for (Slot& slot : slots_) {
    slot.reduced.assign(network_.job.columns.size(), {});
    slot.barrier = {};
  }
  at_barrier_.clear();
  done_.assign(network_.nodes.size(), 0);
  waiting_.assign(network_.nodes.size(), kNone);
  free_.assign(workers, 0.0);
  position_.assign(workers, 0);
  step_.assign(workers, 0);
  resource_free_.assign(static_cast<std::size_t>(network_.resources), 0.0);
  ready_.clear();
  for (std::size_t worker = 0; worker < workers; ++worker) ready_.push_back(static_cast<std::int32_t>(worker));
  times_.assign(detail == Detail::Times ? workers : 0, {});
}

Period PeriodSimulator::run(const std::vector<std::int32_t>& sequence, Detail detail) {
  sequence_ = &sequence;
  reset(detail);
  if (network_.transfers.empty()) {
    run_in_any_order();
  } else {
    run_in_time_order();
  }
  Period result;
  for (std::size_t worker = 0; worker < network_.workers(); ++worker) {
    if (step_[worker] < steps_ && !is_idle(worker)) return result;
  }
  result.complete = true;
  const auto count = static_cast<std::size_t>(steps_), half = count / 2;
  for (std::size_t worker = 0; worker < network_.workers(); ++worker) {
    if (is_idle(worker)) continue;
    const double* const ends = ends_.data() + worker * count;
    result.makespan = std::max(result.makespan, ends[0]);
    result.period = std::max(result.period, (ends[count - 1] - ends[half - 1]) / static_cast<double>(count - half));
  }
  result.ops = std::move(times_);
  return result;
}

// True if the needs of the worker's op are met, with the time from which they are. Otherwise the worker waits for one of them.
bool PeriodSimulator::find_ready(std::int32_t worker, const JobNode& node, std::int32_t step, double& ready) {
  Slot& slot = slots_[static_cast<std::size_t>(step % 2)];
  ready = 0.0;
  for (const Need& need : node.needs) {
    if (need.node == kNone) continue;
    const auto from = static_cast<std::size_t>(need.node);
    if (done_[from] <= step) {
      next_waiting_[static_cast<std::size_t>(worker)] = std::exchange(waiting_[from], worker);
      return false;
    }
    const double there =
        need.transfer == kNone ? slot.end[from] + need.delay : slot.arrival[static_cast<std::size_t>(need.transfer)];
    ready = std::max(ready, there);
  }
  if (node.kind == JobKind::Reduce) return find_reduced(worker, node, step, ready);
  if (node.kind == JobKind::Step && network_.job.barrier) return find_all_reduced(worker, step, ready);
  return true;
}

// The same for a Reduce, which waits for the last worker of its stage. That one wakes the others.
bool PeriodSimulator::find_reduced(std::int32_t worker, const JobNode& node, std::int32_t step, double& ready) {
  Reduction& reduction = slots_[static_cast<std::size_t>(step % 2)].reduced[static_cast<std::size_t>(node.stage)];
  const std::vector<std::int32_t>& column = network_.job.columns[static_cast<std::size_t>(node.stage)];
  if (reduction.step != step) reduction = {step, 0, 0.0};
  if (reduction.come < column.size()) {
    reduction.last = std::max(reduction.last, free_[static_cast<std::size_t>(worker)]);
    if (++reduction.come < column.size()) return false;
    for (const std::int32_t other : column) {
      if (other != worker) ready_.push_back(other);
    }
  }
  ready = reduction.last + network_.job.reduce[static_cast<std::size_t>(node.stage)];
  return true;
}

// The same for a Step behind a barrier. The last Reduce wakes those that wait; see finish().
bool PeriodSimulator::find_all_reduced(std::int32_t worker, std::int32_t step, double& ready) {
  const Reduction& barrier = slots_[static_cast<std::size_t>(step % 2)].barrier;
  ready = barrier.last;
  if (barrier.step == step && barrier.come == reduces_) return true;
  at_barrier_.push_back(worker);
  return false;
}

// Starts the worker's next op and returns its node, or kNone if it must wait or has no op left.
std::int32_t PeriodSimulator::start(std::int32_t worker) {
  const auto w = static_cast<std::size_t>(worker);
  if (step_[w] == steps_ || is_idle(w)) return kNone;
  const std::int32_t index = (*sequence_)[static_cast<std::size_t>(network_.first[w] + position_[w])];
  const JobNode& node = network_.nodes[static_cast<std::size_t>(index)];
  double ready = 0.0;
  if (!find_ready(worker, node, step_[w], ready)) return kNone;
  const double start = std::max(free_[w], ready), end = start + node.duration;
  free_[w] = end;
  if (!times_.empty()) times_[w].push_back({start, end});
  if (node.kind == JobKind::Step) ends_[w * static_cast<std::size_t>(steps_) + static_cast<std::size_t>(step_[w])] = end;
  return index;
}

void PeriodSimulator::finish(std::int32_t index, std::int32_t step, double end) {
  const auto node = static_cast<std::size_t>(index);
  slots_[static_cast<std::size_t>(step % 2)].end[node] = end;
  done_[node] = step + 1;
  const auto w = static_cast<std::size_t>(network_.nodes[node].worker);
  if (++position_[w] == network_.first[w + 1] - network_.first[w]) {
    position_[w] = 0;
    ++step_[w];
  }
  for (std::int32_t worker = std::exchange(waiting_[node], kNone); worker != kNone;) {
    ready_.push_back(worker);
    worker = next_waiting_[static_cast<std::size_t>(worker)];
  }
  if (network_.job.barrier && network_.nodes[node].kind == JobKind::Reduce) {
    Reduction& barrier = slots_[static_cast<std::size_t>(step % 2)].barrier;
    if (barrier.step != step) barrier = {step, 0, 0.0};
    barrier.last = std::max(barrier.last, end);
    if (++barrier.come == reduces_) ready_.insert(ready_.end(), at_barrier_.begin(), at_barrier_.end());
    if (barrier.come == reduces_) at_barrier_.clear();
  }
}

void PeriodSimulator::send(std::int32_t node, std::int32_t step, double posted) {
  Slot& slot = slots_[static_cast<std::size_t>(step % 2)];
  for (const std::int32_t number : network_.sends[static_cast<std::size_t>(node)]) {
    const Transfer& transfer = network_.transfers[static_cast<std::size_t>(number)];
    double departs = posted, leaves = 0.0;
    for (const std::int32_t one : transfer.resource) departs = std::max(departs, resource_free_[static_cast<std::size_t>(one)]);
    for (std::size_t i = 0; i < transfer.resource.size(); ++i) {
      resource_free_[static_cast<std::size_t>(transfer.resource[i])] = departs + transfer.occupancy[i];
      leaves = std::max(leaves, departs + transfer.occupancy[i]);
    }
    slot.arrival[static_cast<std::size_t>(number)] = leaves + transfer.latency;
  }
}

// Without shared links and ports the order in which workers are looked at does not matter.
void PeriodSimulator::run_in_any_order() {
  while (!ready_.empty()) {
    const std::int32_t worker = ready_.back();
    ready_.pop_back();
    const auto w = static_cast<std::size_t>(worker);
    for (std::int32_t node = start(worker); node != kNone; node = start(worker)) finish(node, step_[w], free_[w]);
  }
}

// Messages that share links and ports depart in the order of time.
void PeriodSimulator::run_in_time_order() {
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events;
  const auto start_ready = [&] {
    while (!ready_.empty()) {
      const std::int32_t worker = ready_.back();
      ready_.pop_back();
      const auto w = static_cast<std::size_t>(worker);
      if (const std::int32_t node = start(worker); node != kNone) events.push({free_[w], node, step_[w]});
    }
  };
  for (start_ready(); !events.empty(); start_ready()) {
    const Event event = events.top();
    events.pop();
    send(event.node, event.step, event.time);
    finish(event.node, event.step, event.time);
    ready_.push_back(network_.nodes[static_cast<std::size_t>(event.node)].worker);
  }
}

}  // namespace adaptra::schedule
