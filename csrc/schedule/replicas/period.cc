#include "schedule/replicas/period.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <queue>
#include <utility>

namespace adaptra::schedule {
namespace {

constexpr std::int32_t kNone = -1;

// One need of an op: the op that meets it, and the message that brings it, if the two are on different workers.
struct Need {
  std::int32_t node = kNone;
  std::int32_t message = kNone;  // a row of Network::messages
  double delay = 0.0;            // of a message that occupies nothing
};

struct Node {
  std::int32_t worker;
  std::int32_t stage;
  JobKind kind;
  double duration;
  std::array<Need, 3> needs;
};

// The links and ports that one message occupies, and for how long.
struct Message {
  std::array<std::int32_t, 3> resource;
  std::array<double, 3> occupancy;
  double latency;
};

// The orders as numbered nodes, worker by worker, with their needs looked up.
class Network {
 public:
  Network(const Job& job, const std::vector<JobOrder>& orders) : job_(job) {
    for (const Link& link : job.links) links_[{link.source, link.destination}] = &link;
    const std::size_t ops = job.holder.size();
    for (std::vector<std::int32_t>& table : made_) table.assign(ops, kNone);
    for (const JobOrder& order : orders) {
      first.push_back(static_cast<std::int32_t>(nodes.size()));
      for (const JobOp& op : order) number(op);
    }
    first.push_back(static_cast<std::int32_t>(nodes.size()));
    std::int32_t node = 0;
    for (std::size_t worker = 0; worker < orders.size(); ++worker) {
      for (const JobOp& op : orders[worker])
        connect(nodes[static_cast<std::size_t>(node++)], op, static_cast<std::int32_t>(worker));
    }
  }

  std::vector<Node> nodes;
  std::vector<std::int32_t> first;  // per worker: its first node; and one more
  std::vector<Message> messages;
  std::int32_t resources = 0;

 private:
  enum Made : std::size_t { kForward, kInputGrad, kWeightGrad };

  void number(const JobOp& op) {
    const auto node = static_cast<std::int32_t>(nodes.size());
    nodes.push_back({});
    if (op.kind == JobKind::Reduce || op.kind == JobKind::Step) return;
    const std::size_t at = job_.index(op.replica, op.stage, op.microbatch);
    if (op.kind == JobKind::F) made_[kForward][at] = node;
    if (op.kind == JobKind::I || op.kind == JobKind::B) made_[kInputGrad][at] = node;
    if (op.kind == JobKind::W || op.kind == JobKind::B) made_[kWeightGrad][at] = node;
  }

  void connect(Node& node, const JobOp& op, std::int32_t worker) {
    node.worker = worker;
    node.stage = op.stage;
    node.kind = op.kind;
    node.duration = job_.duration(op.stage, op.kind) * job_.slow[static_cast<std::size_t>(worker)];
    auto next = node.needs.begin();
    const auto need = [&](Made made, std::int32_t stage, std::int32_t microbatch, bool is_accumulator = false) {
      const std::size_t at = job_.index(op.replica, stage, microbatch);
      next->node = made_[made][at];
      const std::int32_t other = job_.holder[at];
      if (other != worker) carry(*next, other, worker, is_accumulator);
      ++next;
    };
    const bool is_input_grad = op.kind == JobKind::I || op.kind == JobKind::B;
    const bool is_weight_grad = op.kind == JobKind::W || op.kind == JobKind::B;
    if (op.kind == JobKind::F && op.stage > 0) need(kForward, op.stage - 1, op.microbatch);
    if (is_input_grad) {
      need(kForward, op.stage, op.microbatch);
      if (op.stage + 1 < job_.stages) need(kInputGrad, op.stage + 1, op.microbatch);
    }
    if (op.kind == JobKind::W) need(kInputGrad, op.stage, op.microbatch);
    if (is_weight_grad && op.microbatch > 0 && job_.hands_over) need(kWeightGrad, op.stage, op.microbatch - 1, true);
  }

  void carry(Need& need, std::int32_t source, std::int32_t destination, bool is_accumulator) {
    const auto found = links_.find({source, destination});
    const Link link = found == links_.end() ? Link{source, destination, job_.latency, job_.occupancy} : *found->second;
    const double latency = is_accumulator ? job_.hand_over : link.latency;
    const double sends = job_.port[static_cast<std::size_t>(source)], takes = job_.port[static_cast<std::size_t>(destination)];
    if (is_accumulator || (link.occupancy == 0.0 && sends == 0.0 && takes == 0.0)) {
      need.delay = latency;
      return;
    }
    const std::array<std::int32_t, 3> resource = {resource_of(source, kNone), resource_of(source, destination),
                                                  resource_of(kNone, destination)};
    need.message = static_cast<std::int32_t>(messages.size());
    messages.push_back({resource, {sends, link.occupancy, takes}, latency});
  }

  // A port that sends is (worker, none), one that receives (none, worker), a link both.
  std::int32_t resource_of(std::int32_t source, std::int32_t destination) {
    const auto [place, is_new] = resource_of_.try_emplace({source, destination}, resources);
    if (is_new) ++resources;
    return place->second;
  }

  const Job& job_;
  std::map<std::pair<std::int32_t, std::int32_t>, const Link*> links_;
  std::map<std::pair<std::int32_t, std::int32_t>, std::int32_t> resource_of_;
  std::array<std::vector<std::int32_t>, 3> made_;
};

// Steps overlap by less than two: a worker reaches step k + 2 only when every worker has reduced in step k. So two slots hold
// all the ends and arrivals that any op still needs.
class PeriodSimulator {
 public:
  PeriodSimulator(const Job& job, const Network& network, std::int32_t steps)
      : job_(job), network_(network), steps_(steps), workers_(network.first.size() - 1) {
    for (Slot& slot : slots_) {
      slot.end.resize(network.nodes.size());
      slot.arrival.resize(network.messages.size());
      slot.reduced.assign(job.columns.size(), {});
    }
    done_.assign(network.nodes.size(), 0);
    waiting_.assign(network.nodes.size(), kNone);
    next_waiting_.assign(workers_, kNone);
    free_.assign(workers_, 0.0);
    position_.assign(workers_, 0);
    step_.assign(workers_, 0);
    resource_free_.assign(static_cast<std::size_t>(network.resources), 0.0);
    ends_.resize(workers_);
    for (std::size_t node = 0; node < network.nodes.size(); ++node) {
      for (const Need& need : network.nodes[node].needs) {
        if (need.message != kNone) sends_of_[need.node].push_back(need.message);
      }
    }
  }

  Period run(Detail detail) {
    Period result;
    if (detail == Detail::Times) times_.resize(workers_);
    for (std::size_t worker = 0; worker < workers_; ++worker) ready_.push_back(static_cast<std::int32_t>(worker));
    if (network_.messages.empty()) {
      run_in_any_order();
    } else {
      run_in_time_order();
    }
    for (std::size_t worker = 0; worker < workers_; ++worker) {
      if (step_[worker] < steps_ && !is_idle(worker)) return result;
    }
    result.complete = true;
    const auto half = static_cast<std::size_t>(steps_ / 2), last = static_cast<std::size_t>(steps_ - 1);
    for (const std::vector<double>& ends : ends_) {
      if (ends.empty()) continue;
      result.makespan = std::max(result.makespan, ends.front());
      result.period = std::max(result.period, (ends[last] - ends[half - 1]) / static_cast<double>(steps_ - steps_ / 2));
    }
    result.ops = std::move(times_);
    return result;
  }

 private:
  struct Reduction {
    std::int32_t step = kNone;
    std::size_t come = 0;
    double last = 0.0;
  };
  struct Slot {
    std::vector<double> end, arrival;
    std::vector<Reduction> reduced;  // per stage
  };
  struct Event {
    double time;
    std::int32_t node;
    std::int32_t step;
    bool operator>(const Event& other) const { return time != other.time ? time > other.time : node > other.node; }
  };

  [[nodiscard]] bool is_idle(std::size_t worker) const { return network_.first[worker] == network_.first[worker + 1]; }

  // When the op of a worker may start by its needs, or nothing if one is not met: then the worker waits for that op.
  [[nodiscard]] bool find_ready(std::int32_t worker, const Node& node, std::int32_t step, double& ready) {
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
          need.message == kNone ? slot.end[from] + need.delay : slot.arrival[static_cast<std::size_t>(need.message)];
      ready = std::max(ready, there);
    }
    if (node.kind != JobKind::Reduce) return true;
    Reduction& reduction = slot.reduced[static_cast<std::size_t>(node.stage)];
    const std::vector<std::int32_t>& column = job_.columns[static_cast<std::size_t>(node.stage)];
    if (reduction.step != step) reduction = {step, 0, 0.0};
    if (reduction.come == column.size()) {  // woken by the last one
      ready = reduction.last + job_.reduce[static_cast<std::size_t>(node.stage)];
      return true;
    }
    reduction.last = std::max(reduction.last, free_[static_cast<std::size_t>(worker)]);
    if (++reduction.come < column.size()) return false;
    for (const std::int32_t other : column) {
      if (other != worker) wake(other);
    }
    ready = reduction.last + job_.reduce[static_cast<std::size_t>(node.stage)];
    return true;
  }

  // Starts the worker's next op and returns its node, or kNone if it must wait or has no op left.
  std::int32_t start(std::int32_t worker) {
    const auto w = static_cast<std::size_t>(worker);
    if (step_[w] == steps_ || is_idle(w)) return kNone;
    const std::int32_t index = network_.first[w] + position_[w];
    const Node& node = network_.nodes[static_cast<std::size_t>(index)];
    double ready = 0.0;
    if (!find_ready(worker, node, step_[w], ready)) return kNone;
    const double start = std::max(free_[w], ready), end = start + node.duration;
    free_[w] = end;
    if (!times_.empty()) times_[w].push_back({start, end});
    if (node.kind == JobKind::Step) ends_[w].push_back(end);
    return index;
  }

  void finish(std::int32_t index, std::int32_t step, double end) {
    const auto node = static_cast<std::size_t>(index);
    slots_[static_cast<std::size_t>(step % 2)].end[node] = end;
    done_[node] = step + 1;
    const auto w = static_cast<std::size_t>(network_.nodes[node].worker);
    if (++position_[w] == network_.first[w + 1] - network_.first[w]) {
      position_[w] = 0;
      ++step_[w];
    }
    std::int32_t worker = std::exchange(waiting_[node], kNone);
    while (worker != kNone) {
      const std::int32_t next = std::exchange(next_waiting_[static_cast<std::size_t>(worker)], kNone);
      wake(worker);
      worker = next;
    }
  }

  void wake(std::int32_t worker) { ready_.push_back(worker); }

  // Without shared links and ports the order in which ops are looked at does not matter.
  void run_in_any_order() {
    while (!ready_.empty()) {
      const std::int32_t worker = ready_.back();
      ready_.pop_back();
      const auto w = static_cast<std::size_t>(worker);
      for (std::int32_t node = start(worker); node != kNone; node = start(worker)) finish(node, step_[w], free_[w]);
    }
  }

  // Messages that share links and ports depart in the order of time.
  void run_in_time_order() {
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
      wake(network_.nodes[static_cast<std::size_t>(event.node)].worker);
    }
  }

  void send(std::int32_t index, std::int32_t step, double posted) {
    const auto found = sends_of_.find(index);
    if (found == sends_of_.end()) return;
    Slot& slot = slots_[static_cast<std::size_t>(step % 2)];
    for (const std::int32_t number : found->second) {
      const Message& message = network_.messages[static_cast<std::size_t>(number)];
      double departs = posted, leaves = 0.0;
      for (const std::int32_t one : message.resource)
        departs = std::max(departs, resource_free_[static_cast<std::size_t>(one)]);
      for (std::size_t i = 0; i < message.resource.size(); ++i) {
        resource_free_[static_cast<std::size_t>(message.resource[i])] = departs + message.occupancy[i];
        leaves = std::max(leaves, departs + message.occupancy[i]);
      }
      slot.arrival[static_cast<std::size_t>(number)] = leaves + message.latency;
    }
  }

  const Job& job_;
  const Network& network_;
  const std::int32_t steps_;
  const std::size_t workers_;
  std::array<Slot, 2> slots_;
  std::vector<std::int32_t> done_;                    // per node: the steps in which it has run
  std::vector<std::int32_t> waiting_, next_waiting_;  // per node, the workers that wait for it, as a chain through workers
  std::vector<double> free_;                          // per worker
  std::vector<std::int32_t> position_, step_;         // per worker
  std::vector<double> resource_free_;
  std::map<std::int32_t, std::vector<std::int32_t>> sends_of_;
  std::vector<std::int32_t> ready_;
  std::vector<std::vector<double>> ends_;  // per worker: the ends of its Step ops
  std::vector<std::vector<Interval>> times_;
};

}  // namespace

Period simulate_period(const Job& job, const std::vector<JobOrder>& orders, std::int32_t steps, Detail detail) {
  const Network network(job, orders);
  return PeriodSimulator(job, network, steps).run(detail);
}

}  // namespace adaptra::schedule
