#include "schedule/simulate/simulator.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "schedule/simulate/constants.h"

namespace adaptra::schedule {
namespace {

constexpr std::int32_t kNobody = -1;

[[nodiscard]] bool exists(std::int32_t number, std::int32_t count) { return number >= 0 && number < count; }

}  // namespace

bool Simulator::Event::operator>(const Event& other) const {
  return std::tie(time, round, begins, goes_second, worker) >
         std::tie(other.time, other.round, other.begins, other.goes_second, other.worker);
}

Simulator::Simulator(const Problem& problem, std::int32_t steps)
    : problem_(problem),
      steps_(steps),
      rule_(problem),
      ways_(problem.slow.size()),
      numbers_(problem.slow.size() + 1),
      needs_time_order_(problem.cost.half_duplex || problem.cost.blocking == Blocking::Both ||
                        std::any_of(problem.port.begin(), problem.port.end(), [](double time) { return time > 0.0; })) {
  for (std::int32_t stage = 0; stage < problem.stages; ++stage) {
    for (std::size_t kind = 0; kind < kKinds; ++kind)
      duration_.push_back(problem.cost.duration(stage, static_cast<Kind>(kind)));
  }
  for (const std::vector<std::int32_t>& column : problem.columns) reduces_ += column.size();
}

void Simulator::reset(const std::vector<Order>& orders, Detail detail) {
  orders_ = &orders;
  times_wanted_ = detail == Detail::Times;
  const auto is_forward = [](const Op& op) { return op.kind == Kind::F; };
  const bool forward_only = steps_ > 2 && std::all_of(orders.begin(), orders.end(), [&](const Order& order) {
                              return std::all_of(order.begin(), order.end(), is_forward);
                            });
  slots_.resize(static_cast<std::size_t>(forward_only ? steps_ : std::min(steps_, 2)));
  for (Slot& slot : slots_) {
    slot.there.assign(problem_.holder.size() * rule_.columns, -1.0);
    slot.reduced.assign(problem_.columns.size(), {});
    slot.barrier = {};
  }
  workers_.assign(orders.size(), {});
  for (std::size_t worker = 0; worker < orders.size(); ++worker) {
    Worker& state = workers_[worker];
    state.next = orders[worker].data();
    state.end = state.next + orders[worker].size();
    state.slot = slots_.data();
    if (state.next == state.end) {
      state.step = steps_;
    } else if (orders[worker].back().kind != Kind::Step) {
      for (std::size_t stage = 0; stage < problem_.columns.size(); ++stage) {
        const std::vector<std::int32_t>& column = problem_.columns[stage];
        if (std::find(column.begin(), column.end(), static_cast<std::int32_t>(worker)) != column.end())
          state.update += problem_.cost.step[stage];
      }
    }
  }
  std::fill(resource_free_.begin(), resource_free_.end(), 0.0);
  at_barrier_.clear();
  if (problem_.cost.blocking == Blocking::Both) under_way_.assign(orders.size(), {});
  ends_.assign(orders.size() * static_cast<std::size_t>(steps_), 0.0);
  ready_.clear();
  for (std::size_t worker = orders.size(); worker-- > 0;) ready_.push_back(static_cast<std::int32_t>(worker));
  result_ = {};
  if (!times_wanted_) return;
  for (std::vector<double>* each : {&result_.busy, &result_.first_start, &result_.last_end}) each->assign(orders.size(), 0.0);
  result_.ops.resize(orders.size());
  for (std::size_t worker = 0; worker < orders.size(); ++worker)
    result_.ops[worker].reserve(orders[worker].size() * static_cast<std::size_t>(steps_));
  result_.messages.reserve(2 * problem_.holder.size());
}

Simulated Simulator::run(const std::vector<Order>& orders, Detail detail) {
  reset(orders, detail);
  if (needs_time_order_) {
    run_in_time_order();
  } else {
    run_in_any_order();
  }
  const auto count = static_cast<std::size_t>(steps_), half = count / 2;
  result_.complete = true;
  for (std::size_t worker = 0; worker < orders.size(); ++worker) {
    result_.complete = result_.complete && workers_[worker].step == steps_;
    const double* const ends = ends_.data() + worker * count;
    result_.makespan = std::max(result_.makespan, ends[0]);
    if (steps_ > 1)
      result_.period = std::max(result_.period, (ends[count - 1] - ends[half - 1]) / static_cast<double>(count - half));
  }
  return std::move(result_);
}

// The time since which all inputs of `op` are there; negative while one is missing.
double Simulator::inputs_there(std::int32_t worker, const Op& op) const {
  const double* const known =
      workers_[at(worker)].slot->there.data() + problem_.index(op.replica, op.stage, op.microbatch) * rule_.columns;
  double there = 0.0;
  for (const Column& column : rule_.needs[static_cast<std::size_t>(op.kind)]) {
    const std::int32_t stage = op.stage + column.offset, microbatch = op.microbatch + column.later;
    if (!exists(stage, problem_.stages) || !exists(microbatch, problem_.microbatches)) continue;
    if (column.when != When::Always) {
      if (problem_.holder[problem_.index(op.replica, stage, microbatch)] == worker) continue;
      if (column.when == When::Changing && problem_.changing[at(stage)] == 0) continue;
    }
    const double since = known[column.index];
    if (since < 0.0) return since;
    there = std::max(there, since);
  }
  return there;
}

// True if the needs of the worker's next op are met, with the time from which they are. Otherwise what it lacks wakes it.
bool Simulator::find_ready(std::int32_t worker, double& ready) {
  const Op& op = *workers_[at(worker)].next;
  if (op.kind == Kind::Reduce) return find_reduced(worker, op, ready);
  if (op.kind == Kind::Step) {
    ready = 0.0;
    return !problem_.barrier || find_all_reduced(worker, ready);
  }
  ready = inputs_there(worker, op);
  return ready >= 0.0;
}

// The same for a Reduce, which waits for the last worker of its stage. That one wakes the others.
bool Simulator::find_reduced(std::int32_t worker, const Op& op, double& ready) {
  Worker& state = workers_[at(worker)];
  Reduction& reduction = state.slot->reduced[at(op.stage)];
  const std::vector<std::int32_t>& column = problem_.columns[at(op.stage)];
  if (reduction.step != state.step) reduction = {state.step, 0, 0.0};
  if (!std::exchange(state.has_come, true)) {
    reduction.last = std::max(reduction.last, state.free);
    if (++reduction.come == column.size()) {
      for (const std::int32_t other : column) {
        if (other != worker) wake(other);
      }
    }
  }
  ready = reduction.last + problem_.cost.reduce[at(op.stage)];
  return reduction.come == column.size();
}

// The same for a Step behind a barrier. The last Reduce wakes those that wait; see finish().
bool Simulator::find_all_reduced(std::int32_t worker, double& ready) {
  const Worker& state = workers_[at(worker)];
  const Reduction& barrier = state.slot->barrier;
  ready = barrier.last;
  if (barrier.step == state.step && barrier.come == reduces_) return true;
  at_barrier_.push_back(worker);
  return false;
}

void Simulator::wake(std::int32_t worker) {
  if (std::exchange(workers_[at(worker)].queued, true)) return;
  ready_.push_back(worker);
}

// Starts the worker's next op and returns its end.
double Simulator::begin(std::int32_t worker, double start) {
  const std::size_t w = at(worker);
  Worker& state = workers_[w];
  const Op& op = *state.next;
  const double end = start + duration_[at(op.stage) * kKinds + static_cast<std::size_t>(op.kind)] * problem_.slow[w];
  if (times_wanted_) {
    if (state.step == 0) {
      if (result_.ops[w].empty()) result_.first_start[w] = start;
      result_.busy[w] += end - start;
      result_.last_end[w] = end;
    }
    result_.ops[w].push_back({start, end});
  }
  return end;
}

void Simulator::finish(std::int32_t worker, double end) {
  const std::size_t w = at(worker);
  Worker& state = workers_[w];
  const Op& op = *state.next;
  state.free = end;
  state.has_come = false;
  publish(worker, op, end);
  if (op.kind == Kind::Reduce && problem_.barrier) {
    Reduction& barrier = state.slot->barrier;
    if (barrier.step != state.step) barrier = {state.step, 0, 0.0};
    barrier.last = std::max(barrier.last, end);
    if (++barrier.come == reduces_) {
      for (const std::int32_t waiting : at_barrier_) wake(waiting);
      at_barrier_.clear();
    }
  }
  if (++state.next != state.end) return;
  ends_[w * static_cast<std::size_t>(steps_) + at(state.step)] = end;
  state.free += state.update;
  state.next = (*orders_)[w].data();
  state.slot = &slots_[static_cast<std::size_t>(++state.step) % slots_.size()];
}

// Makes the output of an op known where it is needed, and sends the messages with it.
void Simulator::publish(std::int32_t worker, const Op& op, double end) {
  Worker& state = workers_[at(worker)];
  double* const there = state.slot->there.data();
  const std::size_t columns = rule_.columns;
  // What the op waited for makes room for the same of a later step.
  if (at(steps_) > slots_.size()) {
    const std::size_t row = problem_.index(op.replica, op.stage, op.microbatch) * columns;
    for (const Column& column : rule_.needs[static_cast<std::size_t>(op.kind)]) there[row + column.index] = -1.0;
  }
  for (const Column& column : rule_.meets[static_cast<std::size_t>(op.kind)]) {
    const std::int32_t stage = op.stage - column.offset, microbatch = op.microbatch - column.later;
    if (!exists(stage, problem_.stages) || !exists(microbatch, problem_.microbatches)) continue;
    const std::size_t consumer = problem_.index(op.replica, stage, microbatch);
    const std::int32_t destination = problem_.holder[consumer];
    Travel travel{end, end};
    if (column.when != When::Always) {
      travel.arrived += problem_.hand_over;
    } else if (destination != worker) {
      travel = send(way_of(worker, destination, op.stage, stage), end);
      if (problem_.cost.blocking != Blocking::None) state.free = std::max(state.free, travel.arrived);
    }
    there[consumer * columns + column.index] = travel.arrived;
    if (destination != worker) wake(destination);
    if (times_wanted_ && state.step == 0 && column.offset != 0)
      result_.messages.push_back({op.replica, op.stage, stage, microbatch, end, travel.departed, travel.arrived});
  }
}

Simulator::Travel Simulator::send(const Way& way, double posted) {
  double departed = posted;
  for (std::size_t i = 0; i < way.occupied; ++i) departed = std::max(departed, resource_free_[way.resource[i]]);
  double leaves = departed;
  for (std::size_t i = 0; i < way.occupied; ++i) {
    const double free = departed + way.occupancy[i];
    resource_free_[way.resource[i]] = free;
    leaves = std::max(leaves, free);
  }
  const Travel travel{departed, leaves + way.latency};
  if (problem_.cost.blocking == Blocking::Both) under_way_[at(way.destination)].push_back(travel);
  return travel;
}

const Simulator::Way& Simulator::way_of(std::int32_t source, std::int32_t destination, std::int32_t from, std::int32_t to) {
  std::vector<Way>& ways = ways_[at(source)];
  for (const Way& way : ways) {
    if (way.destination == destination && way.from == from && way.to == to) return way;
  }
  return new_way(source, destination, from, to);
}

const Simulator::Way& Simulator::new_way(std::int32_t source, std::int32_t destination, std::int32_t from, std::int32_t to) {
  std::vector<Way>& ways = ways_[at(source)];
  const std::size_t edge = at(std::min(from, to));
  Way way{destination, from, to};
  way.latency = (to > from ? problem_.cost.latency_forward : problem_.cost.latency_backward)[edge];
  double occupancy = (to > from ? problem_.cost.occupancy_forward : problem_.cost.occupancy_backward)[edge];
  for (const Link& link : problem_.links) {
    if (link.source == source && link.destination == destination) {
      way.latency = link.latency;
      occupancy = link.occupancy;
    }
  }
  const auto occupies = [&](double time, std::int32_t first, std::int32_t second) {
    way.resource[way.occupied] = resource_of(first, second);
    way.occupancy[way.occupied++] = time;
  };
  const bool turned = problem_.cost.half_duplex && destination < source;
  if (problem_.port[at(source)] > 0.0) occupies(problem_.port[at(source)], source, kNobody);
  occupies(occupancy, turned ? destination : source, turned ? source : destination);
  if (problem_.port[at(destination)] > 0.0) occupies(problem_.port[at(destination)], kNobody, destination);
  return ways.emplace_back(way);
}

// A port that sends is (worker, nobody), one that receives (nobody, worker), a link both.
std::size_t Simulator::resource_of(std::int32_t source, std::int32_t destination) {
  std::vector<std::pair<std::int32_t, std::size_t>>& numbers = source == kNobody ? numbers_.back() : numbers_[at(source)];
  for (const auto& [other, number] : numbers) {
    if (other == destination) return number;
  }
  numbers.emplace_back(destination, resource_free_.size());
  resource_free_.push_back(0.0);
  return numbers.back().second;
}

// Where no two workers compete for anything, each runs ahead until an input is missing. All messages of a link come from one
// worker, in its order, which is also that of time.
void Simulator::run_in_any_order() {
  while (!ready_.empty()) {
    const std::int32_t worker = ready_.back();
    ready_.pop_back();
    Worker& state = workers_[at(worker)];
    double ready = 0.0;
    while (state.step != steps_ && find_ready(worker, ready)) finish(worker, begin(worker, std::max(state.free, ready)));
    state.queued = false;
  }
}

void Simulator::run_in_time_order() {
  now_ = 0.0;
  round_ = 0;
  while (true) {
    while (!ready_.empty()) {
      const std::int32_t worker = ready_.back();
      ready_.pop_back();
      workers_[at(worker)].queued = false;
      look_at(worker);
    }
    if (events_.empty()) return;
    const Event event = events_.top();
    events_.pop();
    now_ = event.time;
    round_ = event.round;
    if (!event.begins) {
      finish(event.worker, now_);
      workers_[at(event.worker)].running = false;
      wake(event.worker);
    } else if (const double until = held_until(event.worker); until > now_) {
      begin_at(event.worker, until);
    } else {
      end_at(event.worker, begin(event.worker, now_));
    }
  }
}

// Begins the worker's next op if its inputs are there or on their way. Where messages hold their receivers, an op begins only
// when its time has come.
void Simulator::look_at(std::int32_t worker) {
  Worker& state = workers_[at(worker)];
  double ready = 0.0;
  if (state.running || state.step == steps_ || !find_ready(worker, ready)) return;
  state.running = true;
  const double start = std::max(state.free, ready);
  if (problem_.cost.blocking == Blocking::Both) {
    begin_at(worker, std::max(start, now_));
  } else {
    end_at(worker, begin(worker, start));
  }
}

void Simulator::begin_at(std::int32_t worker, double time) {
  events_.push({time, time > now_ ? 0 : round_, true, false, worker});
}

void Simulator::end_at(std::int32_t worker, double time) {
  const bool second = problem_.cost.half_duplex && workers_[at(worker)].next->kind != Kind::F;
  events_.push({time, time > now_ ? 0 : round_ + 1, false, second, worker});
}

// The time until which the messages that are under way to a worker hold it; `now_` if none does.
double Simulator::held_until(std::int32_t worker) {
  double until = now_;
  std::erase_if(under_way_[at(worker)], [&](const Travel& travel) {
    if (travel.departed <= now_) until = std::max(until, travel.arrived);
    return travel.arrived <= now_;
  });
  return until;
}

}  // namespace adaptra::schedule
