// Simulation in time order. Within one instant, ops end and messages arrive first, then edges begin to serve, then ranks begin
// ops in rank order. Messages that take no time are delivered before any rank begins. On a shared edge messages are served in
// the order in which their producers ended, a forward message first on a tie.
#include <algorithm>
#include <queue>
#include <set>
#include <tuple>
#include <utility>

#include "schedule/simulate/simulation_state.h"

namespace adaptra::schedule {
namespace {

enum class EventKind : std::uint8_t { OpEnds, EdgeFree, MessageArrives };

// `index` is a rank, an edge or a message. `sequence` makes the order of simultaneous events that of their creation.
struct Event {
  double time;
  std::uint64_t sequence;
  EventKind kind;
  std::size_t index;
  bool operator>(const Event& other) const { return std::tie(time, sequence) > std::tie(other.time, other.sequence); }
};

struct Waiting {
  double posted;
  bool backward;
  std::uint64_t sequence;
  std::size_t message;
  bool operator>(const Waiting& other) const {
    return std::tie(posted, backward, sequence) > std::tie(other.posted, other.backward, other.sequence);
  }
};

template <typename Entry>
using Earliest = std::priority_queue<Entry, std::vector<Entry>, std::greater<>>;

struct Link {
  Earliest<Waiting> waiting;
  bool busy = false;
};

struct Transfer {
  Message message;
  std::size_t column;
};

class EventSimulator : public SimulationState {
 public:
  EventSimulator(const Problem& problem, const std::vector<Order>& orders, const Rule& rule, Detail detail)
      : SimulationState(problem, orders, rule, detail),
        edges_(at(stages_) - 1),
        links_(problem.cost.half_duplex ? edges_ : 2 * edges_),
        running_(orders.size(), false),
        holds_(orders.size(), 0) {
    for (std::size_t rank = 0; rank < orders.size(); ++rank) changed_ranks_.insert(rank);
  }

  Result run() {
    double now = 0.0;
    while (true) {
      settle(now);
      if (events_.empty()) break;
      now = events_.top().time;
      handle_until(now);
    }
    result_.complete = finish();
    if (times_wanted_) {
      for (const Transfer& transfer : transfers_) result_.messages.push_back(transfer.message);
    }
    return std::move(result_);
  }

 private:
  [[nodiscard]] bool pending(double now) const { return !events_.empty() && events_.top().time <= now; }

  void handle_until(double now) {
    while (pending(now)) {
      const Event event = events_.top();
      events_.pop();
      switch (event.kind) {
        case EventKind::OpEnds: end_op(event); break;
        case EventKind::EdgeFree:
          links_[event.index].busy = false;
          changed_links_.insert(event.index);
          break;
        case EventKind::MessageArrives: arrive(event); break;
      }
    }
  }

  // Lets edges and ranks begin whatever they can at this instant, until nothing more happens in it.
  void settle(double now) {
    while (true) {
      for (const std::size_t link : changed_links_) serve(link, now);
      changed_links_.clear();
      if (!pending(now)) {
        for (const std::size_t rank : changed_ranks_) begin_op(rank, now);
        changed_ranks_.clear();
      }
      if (!pending(now)) return;
      handle_until(now);
    }
  }

  void serve(std::size_t link, double now) {
    if (links_[link].busy || links_[link].waiting.empty()) return;
    const std::size_t index = links_[link].waiting.top().message;
    links_[link].waiting.pop();
    links_[link].busy = true;
    Message& message = transfers_[index].message;
    const std::size_t edge = at(std::min(message.source, message.destination));
    const bool forward = message.destination > message.source;
    const Cost& cost = problem_.cost;
    const double free = now + (forward ? cost.occupancy_forward : cost.occupancy_backward)[edge];
    message.departed = now;
    message.arrived = free + (forward ? cost.latency_forward : cost.latency_backward)[edge];
    schedule(free, EventKind::EdgeFree, link);
    schedule(message.arrived, EventKind::MessageArrives, index);
    if (cost.blocking == Blocking::Both) ++holds_[rank_of(message.destination)];
  }

  void begin_op(std::size_t rank, double now) {
    if (running_[rank] || holds_[rank] > 0 || position_[rank] >= orders_[rank].size()) return;
    const Op& op = orders_[rank][position_[rank]];
    if (inputs_there(op) < 0.0) return;
    const double end = now + problem_.cost.duration(op.stage, op.kind);
    record(static_cast<std::int32_t>(rank), now, end);
    running_[rank] = true;
    schedule(end, EventKind::OpEnds, rank);
  }

  void end_op(const Event& event) {
    const std::size_t rank = event.index;
    running_[rank] = false;
    changed_ranks_.insert(rank);
    const Op& op = orders_[rank][position_[rank] - 1];
    publish(op, event.time, [&](std::int32_t consumer, std::size_t column) {
      const bool backward = consumer < op.stage;
      const std::size_t edge = at(std::min(op.stage, consumer));
      const std::size_t link = edge + (backward && !problem_.cost.half_duplex ? edges_ : 0);
      links_[link].waiting.push({event.time, backward, event.sequence, transfers_.size()});
      transfers_.push_back({{op.stage, consumer, op.microbatch, event.time, event.time, event.time}, column});
      changed_links_.insert(link);
      if (problem_.cost.blocking != Blocking::None) ++holds_[rank];
    });
  }

  void arrive(const Event& event) {
    const auto& [message, column] = transfers_[event.index];
    make_available(message.destination, message.microbatch, column, event.time);
    changed_ranks_.insert(rank_of(message.destination));
    switch (problem_.cost.blocking) {
      case Blocking::None: break;
      case Blocking::Both: --holds_[rank_of(message.destination)]; [[fallthrough]];
      case Blocking::Send:
        --holds_[rank_of(message.source)];
        changed_ranks_.insert(rank_of(message.source));
        break;
    }
  }

  [[nodiscard]] std::size_t rank_of(std::int32_t stage) const { return at(problem_.placement[at(stage)]); }

  void schedule(double time, EventKind kind, std::size_t index) { events_.push({time, ++sequence_, kind, index}); }

  std::size_t edges_;
  std::vector<Link> links_;  // one per edge, or one per edge and direction: forward edges first
  std::vector<bool> running_;
  std::vector<std::int32_t> holds_;  // per rank, how many messages keep it from beginning an op
  std::vector<Transfer> transfers_;
  Earliest<Event> events_;
  std::uint64_t sequence_ = 0;
  std::set<std::size_t> changed_links_, changed_ranks_;  // ordered: the first to begin decides later ties
};

}  // namespace

Result simulate_events(const Problem& problem, const std::vector<Order>& orders, const Rule& rule, Detail detail) {
  return EventSimulator(problem, orders, rule, detail).run();
}

}  // namespace adaptra::schedule
