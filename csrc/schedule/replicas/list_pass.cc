#include "schedule/replicas/list_pass.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <queue>
#include <tuple>

namespace adaptra::schedule {
namespace {

// An op's end, or its last input's arrival, or the time from which a worker may start.
struct Moment {
  enum class What : std::uint8_t { End, Arrival, Release };

  double time;
  What what;
  std::int32_t which;  // a node, or a worker for Release
  bool operator>(const Moment& other) const {
    return std::tie(time, what, which) > std::tie(other.time, other.what, other.which);
  }
};

[[nodiscard]] bool computes(const Node& node) { return !is_update(node.kind); }

// Whether a microbatch begins or ends on a stage with this op.
[[nodiscard]] bool is_outer(const Node& node, bool is_first) {
  return is_first ? node.kind == Kind::F : node.kind == Kind::W || node.kind == Kind::B;
}

constexpr double kSlack = 1e-9;  // of a sum of memory over its limit, as adaptra.simulation.cost.MEMORY_TOLERANCE

}  // namespace

Room room_for(const std::vector<std::int32_t>& microbatches, const Problem& problem) {
  return {{microbatches.begin(), microbatches.end()},
          std::vector<double>(problem.columns.size(), 1.0),
          std::vector<double>(problem.columns.size(), 0.0)};
}

Room room_of(const Problem& problem) {
  Room room{problem.cost.memory_limit, problem.cost.memory_forward, problem.cost.memory_input_grad};
  if (room.most.empty()) room.most.assign(problem.slow.size(), std::numeric_limits<double>::infinity());
  return room;
}

ListPass::ListPass(const Network& network, const Room& room) : network_(network), room_(room) {
  const std::size_t count = network.nodes.size();
  for (Graph* graph : {&forward_, &backward_}) {
    graph->needed.assign(count, 0);
    graph->dependents.resize(count);
  }
  // Ops of one kind, replica and stage keep microbatch order on their worker; nodes are numbered in that order.
  std::map<std::tuple<std::int32_t, std::int32_t, Kind>, std::int32_t> before;
  for (std::size_t index = 0; index < count; ++index) {
    const Node& node = network.nodes[index];
    if (!computes(node)) continue;
    ++ops_;
    const auto at = static_cast<std::int32_t>(index);
    for (const Need& need : node.needs) {
      if (need.node == kNone) continue;
      const bool occupies = need.transfer != kNone;
      const double latency = occupies ? network.transfers[static_cast<std::size_t>(need.transfer)].latency : need.delay;
      add(need.node, at, latency, need.transfer);
    }
    const auto [place, is_first] =
        before.try_emplace({node.worker, node.replica * network.problem.stages + node.stage, node.kind}, at);
    if (!is_first) {
      add(place->second, at, 0.0);
      place->second = at;
    }
  }
  sequence_.resize(count);
  std::iota(sequence_.begin(), sequence_.end(), 0);  // Reduce and Step keep their places behind the other ops
  starts_.resize(count);
  ends_.resize(count);
  arrives_.resize(count);
  offered_.resize(network.workers());
  stages_of_.resize(network.workers());
  bool several = false;
  for (std::size_t stage = 0; stage < network.problem.columns.size(); ++stage) {
    for (const std::int32_t worker : network.problem.columns[stage]) {
      stages_of_[static_cast<std::size_t>(worker)].push_back(static_cast<std::int32_t>(stage));
      several = several || stages_of_[static_cast<std::size_t>(worker)].size() > 1;
    }
  }
  if (several) begun_.resize(network.workers() * network.problem.columns.size());
  expects_.resize(network.workers());
}

void ListPass::add(std::int32_t before, std::int32_t after, double delay, std::int32_t transfer) {
  forward_.dependents[static_cast<std::size_t>(before)].push_back({after, delay, transfer});
  ++forward_.needed[static_cast<std::size_t>(after)];
  backward_.dependents[static_cast<std::size_t>(after)].push_back({before, delay, transfer});
  ++backward_.needed[static_cast<std::size_t>(before)];
}

// The time for which the message occupies a link or port.
double ListPass::occupancy(const Dependent& dependent) const {
  if (dependent.transfer == kNone) return 0.0;
  const std::array<double, 3>& each = network_.transfers[static_cast<std::size_t>(dependent.transfer)].occupancy;
  return *std::max_element(each.begin(), each.end());
}

// Occupies the links and ports of the message. Backwards it takes its latency first.
double ListPass::arrival(const Dependent& dependent, double posted) {
  if (dependent.transfer == kNone) return posted + dependent.delay;
  const Transfer& transfer = network_.transfers[static_cast<std::size_t>(dependent.transfer)];
  double departs = backwards_ ? posted + dependent.delay : posted;
  for (const std::int32_t one : transfer.resource) departs = std::max(departs, resource_free_[static_cast<std::size_t>(one)]);
  const double leaves = departs + occupancy(dependent);
  for (std::size_t i = 0; i < transfer.resource.size(); ++i) {
    resource_free_[static_cast<std::size_t>(transfer.resource[i])] = departs + transfer.occupancy[i];
  }
  return backwards_ ? leaves : leaves + dependent.delay;
}

void ListPass::offer(std::int32_t node) {
  if (patience_ > 0.0) {
    std::vector<std::int32_t>& expects =
        expects_[static_cast<std::size_t>(network_.nodes[static_cast<std::size_t>(node)].worker)];
    expects.erase(std::remove(expects.begin(), expects.end(), node), expects.end());
  }
  push(node);
}

void ListPass::push(std::int32_t node) {
  std::vector<std::int32_t>& heap = offered_[static_cast<std::size_t>(network_.nodes[static_cast<std::size_t>(node)].worker)];
  heap.push_back(node);
  std::push_heap(heap.begin(), heap.end(), [this](std::int32_t a, std::int32_t b) { return goes_later(a, b); });
}

bool ListPass::goes_later(std::int32_t a, std::int32_t b) const {
  const double first = (*priority_)[static_cast<std::size_t>(a)], second = (*priority_)[static_cast<std::size_t>(b)];
  return first != second ? first > second : a > b;
}

// What the op takes when it starts.
double ListPass::taken_by(const Node& node) const {
  const auto stage = static_cast<std::size_t>(node.stage);
  const double all = room_.taken[stage], early = room_.freed_by_input[stage];
  if (!backwards_) return node.kind == Kind::F ? all : 0.0;
  return node.kind == Kind::W ? all - early : node.kind == Kind::I ? early : node.kind == Kind::B ? all : 0.0;
}

// What it frees when it ends.
double ListPass::freed_by(const Node& node) const {
  const auto stage = static_cast<std::size_t>(node.stage);
  const double all = room_.taken[stage], early = room_.freed_by_input[stage];
  if (backwards_) return node.kind == Kind::F ? all : 0.0;
  return node.kind == Kind::W ? all - early : node.kind == Kind::I ? early : node.kind == Kind::B ? all : 0.0;
}

// What must be free for it to start. Backwards a W leaves room for an I, so that no worker waits for what only that would free.
double ListPass::lasting(const Node& node) const {
  return is_outer(node, !backwards_) ? room_.taken[static_cast<std::size_t>(node.stage)] : taken_by(node);
}

// Of several stages each keeps one place, so that none waits for a place that only its own ops would free.
bool ListPass::fits(std::int32_t node) const {
  const Node& one = network_.nodes[static_cast<std::size_t>(node)];
  const auto worker = static_cast<std::size_t>(one.worker);
  const double needed = lasting(one);
  if (needed == 0.0) return true;
  double kept = 0.0;
  for (const std::int32_t other : stages_of_[worker]) {
    if (stages_of_[worker].size() > 1 && other != one.stage && begun_[place_of(worker, other)] == 0)
      kept += room_.taken[static_cast<std::size_t>(other)];
  }
  return held_[worker] + kept + needed <= room_.most[worker] + kSlack;
}

bool ListPass::delays_a_better_one(std::int32_t node, double now) const {
  const Node& one = network_.nodes[static_cast<std::size_t>(node)];
  const std::vector<std::int32_t>& expects = expects_[static_cast<std::size_t>(one.worker)];
  return std::any_of(expects.begin(), expects.end(), [&](std::int32_t other) {
    return expected_[static_cast<std::size_t>(other)] < now + patience_ * one.duration && goes_later(node, other) &&
           fits(other);
  });
}

// Takes the op that the worker starts now, or kNone.
std::int32_t ListPass::take(std::size_t worker, double now) {
  std::vector<std::int32_t>& heap = offered_[worker];
  std::int32_t chosen = kNone;
  put_aside_.clear();
  while (!heap.empty() && chosen == kNone) {
    std::pop_heap(heap.begin(), heap.end(), [this](std::int32_t a, std::int32_t b) { return goes_later(a, b); });
    const std::int32_t node = heap.back();
    heap.pop_back();
    if (fits(node) && !delays_a_better_one(node, now)) {
      chosen = node;
    } else {
      put_aside_.push_back(node);
    }
  }
  for (const std::int32_t node : put_aside_) push(node);
  return chosen;
}

void ListPass::hold(const Node& node, double more) { held_[static_cast<std::size_t>(node.worker)] += more; }

void ListPass::start(std::int32_t node, double now) {
  const auto at = static_cast<std::size_t>(node);
  const Node& one = network_.nodes[at];
  const auto worker = static_cast<std::size_t>(one.worker);
  hold(one, taken_by(one));
  if (!begun_.empty() && is_outer(one, !backwards_)) ++begun_[place_of(worker, one.stage)];
  busy_[worker] = true;
  sequence_[static_cast<std::size_t>(next_[worker]++)] = node;
  starts_[at] = now;
  ends_[at] = now + one.duration;
  if (patience_ == 0.0) return;
  for (const Dependent& dependent : (backwards_ ? backward_ : forward_).dependents[at]) {
    const auto to = static_cast<std::size_t>(dependent.node);
    expected_[to] = std::max(expected_[to], ends_[at] + dependent.delay + occupancy(dependent));
    if (--not_started_[to] == 0) expects_[static_cast<std::size_t>(network_.nodes[to].worker)].push_back(dependent.node);
  }
}

bool ListPass::run(bool backwards, const std::vector<double>& priority, const std::vector<double>& release, double patience) {
  const Graph& graph = backwards ? backward_ : forward_;
  const std::size_t workers = network_.workers();
  backwards_ = backwards;
  priority_ = &priority;
  needed_ = graph.needed;
  patience_ = patience;
  if (patience > 0.0) {
    not_started_ = graph.needed;
    expected_.assign(network_.nodes.size(), 0.0);
    for (std::vector<std::int32_t>& expects : expects_) expects.clear();
  }
  std::fill(arrives_.begin(), arrives_.end(), 0.0);
  resource_free_.assign(static_cast<std::size_t>(network_.resources), 0.0);
  for (std::vector<std::int32_t>& heap : offered_) heap.clear();
  held_.assign(workers, 0.0);
  std::fill(begun_.begin(), begun_.end(), 0);
  busy_.assign(workers, true);  // until its release
  next_.assign(network_.first.begin(), network_.first.end() - 1);
  std::priority_queue<Moment, std::vector<Moment>, std::greater<>> moments;
  for (std::size_t node = 0; node < network_.nodes.size(); ++node) {
    if (needed_[node] == 0 && computes(network_.nodes[node])) offer(static_cast<std::int32_t>(node));
  }
  for (std::size_t worker = 0; worker < workers; ++worker) {
    moments.push({release[worker], Moment::What::Release, static_cast<std::int32_t>(worker)});
  }
  std::vector<std::size_t> touched;
  std::int64_t left = ops_;
  while (!moments.empty()) {
    const double now = moments.top().time;
    touched.clear();
    while (!moments.empty() && moments.top().time == now) {
      const Moment moment = moments.top();
      moments.pop();
      if (moment.what == Moment::What::Release) {
        busy_[static_cast<std::size_t>(moment.which)] = false;
        touched.push_back(static_cast<std::size_t>(moment.which));
        continue;
      }
      const auto at = static_cast<std::size_t>(moment.which);
      const Node& node = network_.nodes[at];
      const auto worker = static_cast<std::size_t>(node.worker);
      touched.push_back(worker);
      if (moment.what == Moment::What::Arrival) {
        offer(moment.which);
        continue;
      }
      --left;
      busy_[worker] = false;
      hold(node, -freed_by(node));
      if (!begun_.empty() && is_outer(node, backwards)) --begun_[place_of(worker, node.stage)];
      for (const Dependent& dependent : graph.dependents[at]) {
        const auto to = static_cast<std::size_t>(dependent.node);
        arrives_[to] = std::max(arrives_[to], arrival(dependent, now));
        if (--needed_[to] > 0) continue;
        if (arrives_[to] > now) {
          moments.push({arrives_[to], Moment::What::Arrival, dependent.node});
        } else {
          offer(dependent.node);
          touched.push_back(static_cast<std::size_t>(network_.nodes[to].worker));
        }
      }
    }
    for (const std::size_t worker : touched) {
      if (busy_[worker]) continue;
      const std::int32_t chosen = take(worker, now);
      if (chosen == kNone) continue;
      start(chosen, now);
      moments.push({ends_[static_cast<std::size_t>(chosen)], Moment::What::End, chosen});
    }
  }
  return left == 0;
}

}  // namespace adaptra::schedule
