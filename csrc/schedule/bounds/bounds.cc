// Notation. For a stage i, T_F, T_I and T_W are how long one op keeps the stage from doing anything else. L is how long it then
// takes until the op's message has arrived. Without blocking, T is the op's duration and L the message's occupancy + latency.
// Where communication blocks, the sender is held until its message arrives, so L is a part of T.
//
// What an op waits for is read from the rule, see Ways. The way of a microbatch from F to I is the longest chain of needs.
//
// All arguments count ops: "the k-th op of this kind to run on this stage", whichever microbatch that is. So they hold for
// every order and every placement; microbatches need not run in order.
#include "schedule/bounds/bounds.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <queue>
#include <span>
#include <utility>
#include <vector>

#include "schedule/simulate/rule.h"

namespace adaptra::schedule {
namespace {

using Numbers = std::vector<double>;

constexpr double kMemoryTolerance = 1e-9;

// The op of a kind on a stage. Those of F come first, then I, then W.
std::size_t op_of(Kind kind, std::size_t stage, std::size_t stages) { return static_cast<std::size_t>(kind) * stages + stage; }

// What an op of a microbatch needs of the same microbatch by a row of the rule, and the message that brings it.
struct Need {
  std::size_t op;
  double occupancy, latency;  // zero on the same stage
  double flight;              // L
};

// The ops F, I and W of one microbatch with their needs. Needs of other microbatches are left out, and no bound relies on them.
class Ways {
 public:
  Ways(const Problem& problem, bool blocking) : stages_(problem.cost.forward.size()) {
    const Cost& cost = problem.cost;
    const CompiledRule rule(problem);
    for (const Kind kind : {Kind::F, Kind::I, Kind::W}) {
      for (std::size_t s = 0; s < stages_; ++s) {
        first_.push_back(needs_.size());
        times_.push_back(cost.duration(static_cast<std::int32_t>(s), kind));
        for (const Column& row : rule.needs[static_cast<std::size_t>(kind)]) {
          const std::size_t from = s + static_cast<std::size_t>(row.offset);
          if (row.later != 0 || from >= stages_) continue;
          Need need{0, 0.0, 0.0, 0.0};
          if (row.offset != 0) {
            const std::size_t edge = std::min(s, from);
            need.occupancy = (from < s ? cost.occupancy_forward : cost.occupancy_backward)[edge];
            need.latency = (from < s ? cost.latency_forward : cost.latency_backward)[edge];
          }
          for (const Kind by : {Kind::F, Kind::I, Kind::W}) {
            if (!row.is_met_by(by)) continue;
            need.op = op_of(by, from, stages_);
            needs_.push_back(need);
          }
        }
      }
    }
    first_.push_back(needs_.size());
    std::vector<double> held(times_.size(), 0.0);  // until its messages have arrived
    for (Need& need : needs_) {
      const double flight = need.occupancy + need.latency;
      (blocking ? held[need.op] : need.flight) = std::max(blocking ? held[need.op] : 0.0, flight);
    }
    for (std::size_t op = 0; op < times_.size(); ++op) times_[op] += held[op];
    std::vector<bool> begun(times_.size(), false);
    for (std::size_t op = 0; op < times_.size(); ++op) sort(op, begun);
  }

  // T of an op.
  [[nodiscard]] double time(std::size_t op) const { return times_[op]; }
  // All ops, each behind its needs.
  [[nodiscard]] const std::vector<std::size_t>& order() const { return order_; }
  [[nodiscard]] std::span<const Need> needs(std::size_t op) const {
    return {needs_.data() + first_[op], first_[op + 1] - first_[op]};
  }
  // The number of a need among all.
  [[nodiscard]] std::size_t number(const Need& need) const { return static_cast<std::size_t>(&need - needs_.data()); }
  [[nodiscard]] std::size_t count() const { return needs_.size(); }

  // Per op, the least time until it starts.
  [[nodiscard]] Numbers heads() const {
    Numbers found(times_.size(), 0.0);
    for (const std::size_t op : order_) {
      for (const Need& need : needs(op)) found[op] = std::max(found[op], found[need.op] + times_[need.op] + need.flight);
    }
    return found;
  }

  // Per op, the least time that follows its end.
  [[nodiscard]] Numbers tails() const {
    Numbers found(times_.size(), 0.0);
    for (auto op = order_.rbegin(); op != order_.rend(); ++op) {
      for (const Need& need : needs(*op)) found[need.op] = std::max(found[need.op], need.flight + times_[*op] + found[*op]);
    }
    return found;
  }

  // The least time between the end of one op and the start of another that needs it, if only through others. Else -infinity.
  [[nodiscard]] double between(std::size_t first, std::size_t last) const {
    Numbers since(times_.size(), -std::numeric_limits<double>::infinity());  // from the end of the first one to the start
    for (const std::size_t op : order_) {
      for (const Need& need : needs(op)) {
        const double before = need.op == first ? 0.0 : since[need.op] + times_[need.op];
        since[op] = std::max(since[op], before + need.flight);
      }
    }
    return since[last];
  }

  // The time of the ops on the same stage that need this one, if only through others on the stage.
  [[nodiscard]] double following(std::size_t op) const {
    double total = 0.0;
    for (std::size_t other = op % stages_; other < times_.size(); other += stages_)
      total += follows(other, op) ? times_[other] : 0.0;
    return total;
  }

 private:
  [[nodiscard]] bool follows(std::size_t op, std::size_t first) const {
    const std::span<const Need> all = needs(op);
    return std::any_of(all.begin(), all.end(), [&](const Need& need) {
      return need.op % stages_ == op % stages_ && (need.op == first || follows(need.op, first));
    });
  }

  void sort(std::size_t op, std::vector<bool>& begun) {
    if (begun[op]) return;
    begun[op] = true;
    for (const Need& need : needs(op)) sort(need.op, begun);
    order_.push_back(op);
  }

  const std::size_t stages_;
  Numbers times_;
  std::vector<Need> needs_;  // of all ops, one op after the other
  std::vector<std::size_t> first_, order_;
};

// One number for the k-th op of a kind to run on each stage: row of the op, column k.
class Table {
 public:
  Table(std::size_t ops, std::size_t microbatches) : microbatches_(microbatches), values_(ops * microbatches, 0.0) {}
  double& operator()(std::size_t op, std::size_t k) { return values_[op * microbatches_ + k]; }

 private:
  std::size_t microbatches_;
  Numbers values_;
};

// One op on one machine: it can't start before `head`, and at least `tail` passes between its end and the end of everything.
struct Job {
  double head;
  double duration;
  double tail;
};

// The least makespan of jobs on one machine that may interrupt them (Jackson 1955, Horn 1974). Of the jobs whose heads have
// passed, the machine always runs the one with the longest tail. No order without interruptions is shorter.
double one_machine(std::vector<Job> jobs) {
  std::sort(jobs.begin(), jobs.end(), [](const Job& a, const Job& b) { return a.head < b.head; });
  const auto shorter_tail = [](const Job& a, const Job& b) { return a.tail < b.tail; };
  std::priority_queue<Job, std::vector<Job>, decltype(shorter_tail)> there(shorter_tail);
  double now = 0.0;
  double makespan = 0.0;
  for (std::size_t next = 0; next < jobs.size() || !there.empty();) {
    if (there.empty()) now = std::max(now, jobs[next].head);
    for (; next < jobs.size() && jobs[next].head <= now; ++next) there.push(jobs[next]);
    Job job = there.top();
    there.pop();
    const double until = next < jobs.size() ? jobs[next].head : std::numeric_limits<double>::infinity();
    if (now + job.duration <= until) {
      now += job.duration;
      makespan = std::max(makespan, now + job.tail);
    } else {
      job.duration -= until - now;
      now = until;
      there.push(job);
    }
  }
  return makespan;
}

class Bounds {
 public:
  explicit Bounds(const Problem& problem)
      : cost_(problem.cost),
        problem_(problem),
        stages_(problem.cost.forward.size()),
        microbatches_(static_cast<std::size_t>(problem.microbatches)),
        blocking_(problem.cost.blocking != Blocking::None),
        ways_(problem, blocking_),
        head_(ways_.heads()),
        tail_(ways_.tails()),
        in_flight_(stages_, microbatches_) {
    for (std::size_t s = 0; s < stages_; ++s) down_.push_back(ways_.between(f(s), i(s)));
    for (std::size_t s = 0; s < stages_ && !cost_.memory_limit.empty(); ++s) {
      const double limit = cost_.memory_limit[static_cast<std::size_t>(problem.placement[s])] + kMemoryTolerance;
      const double most = std::floor(limit / cost_.memory_forward[s]);
      if (most < static_cast<double>(microbatches_)) in_flight_[s] = static_cast<std::size_t>(most);
    }
  }

  Bound greatest() {
    if (std::find(in_flight_.begin(), in_flight_.end(), 0U) != in_flight_.end()) {
      const auto stage = std::find(in_flight_.begin(), in_flight_.end(), 0U) - in_flight_.begin();
      return {std::numeric_limits<double>::infinity(), BoundKind::Memory, static_cast<std::int32_t>(stage)};
    }
    load();
    drain_and_chain();
    memory();
    links();
    machines();
    return best_;
  }

 private:
  void offer(double value, BoundKind kind, std::size_t where) {
    if (value > best_.value * (1.0 + 1e-12)) best_ = {value, kind, static_cast<std::int32_t>(where)};
  }

  [[nodiscard]] double times(std::size_t count, double duration) const { return static_cast<double>(count) * duration; }

  [[nodiscard]] std::size_t f(std::size_t stage) const { return op_of(Kind::F, stage, stages_); }
  [[nodiscard]] std::size_t i(std::size_t stage) const { return op_of(Kind::I, stage, stages_); }
  [[nodiscard]] std::size_t w(std::size_t stage) const { return op_of(Kind::W, stage, stages_); }
  [[nodiscard]] double time(std::size_t op) const { return ways_.time(op); }
  [[nodiscard]] std::size_t stage_of(std::size_t op) const { return op % stages_; }
  [[nodiscard]] std::size_t rank_of(std::size_t op) const { return static_cast<std::size_t>(problem_.placement[stage_of(op)]); }

  // Load: a rank runs all its ops one after the other. That takes M·(T_F + T_I + T_W) from the earliest start of its first
  // forward.
  void load() {
    for (std::size_t rank = 0; rank < static_cast<std::size_t>(problem_.workers); ++rank) {
      double head = std::numeric_limits<double>::infinity();
      double work = 0.0;
      for (std::size_t s = 0; s < stages_; ++s) {
        if (static_cast<std::size_t>(problem_.placement[s]) != rank) continue;
        head = std::min(head, head_[f(s)]);
        work += times(microbatches_, time(f(s)) + time(i(s)) + time(w(s)));
      }
      offer(head + work, BoundKind::Load, rank);
    }
  }

  // Drain: a stage runs all its F and I, then the tail follows. head of F + M·(T_F + T_I) + tail of I.
  // Chain: the first F makes its round trip, then all I follow. head of I + M·T_I + tail of I.
  void drain_and_chain() {
    for (std::size_t s = 0; s < stages_; ++s) {
      offer(head_[f(s)] + times(microbatches_, time(f(s)) + time(i(s))) + tail_[i(s)], BoundKind::Drain, s);
    }
    for (std::size_t s = 0; s < stages_; ++s) {
      offer(head_[i(s)] + times(microbatches_, time(i(s))) + tail_[i(s)], BoundKind::Chain, s);
    }
  }

  // Memory: with at most A microbatches in flight, forward k + A can't start before I k has ended. So M microbatches make q + 1
  // round trips, q = floor((M - 1) / A). After the last of them r = (M - 1) mod A further I follow.
  void memory() {
    for (std::size_t s = 0; s < stages_; ++s) {
      const std::size_t trips = (microbatches_ - 1) / in_flight_[s] + 1;
      const std::size_t rest = (microbatches_ - 1) % in_flight_[s];
      const double trip = time(f(s)) + down_[s] + time(i(s));
      offer(head_[f(s)] + times(trips, trip) + times(rest, time(i(s))) + tail_[i(s)], BoundKind::Memory, s);
    }
  }

  // Link: M messages of a kind occupy an edge one after the other, between the ways to the first and from the last of them. So
  // do those of both directions that share an edge.
  void links() {
    std::vector<std::vector<Message>> of_edge(stages_);
    for (const std::size_t op : ways_.order()) {
      for (const Need& need : ways_.needs(op)) {
        const std::size_t from = rank_of(need.op), to = rank_of(op);
        if (stage_of(need.op) == stage_of(op)) continue;
        const Message message{&need, op};
        offer(first_departure(message) + times(microbatches_, need.occupancy) + after_last(message), message);
        if (cost_.half_duplex) of_edge[std::min(stage_of(need.op), stage_of(op))].push_back(message);
        const bool turned = cost_.half_duplex && to < from;
        if (from != to) of_link_[{turned ? to : from, turned ? from : to}].push_back(message);
      }
    }
    for (const std::vector<Message>& messages : of_edge) {
      if (messages.empty()) continue;
      double first = std::numeric_limits<double>::infinity(), last = first, busy = 0.0;
      for (const Message& message : messages) {
        first = std::min(first, first_departure(message));
        last = std::min(last, after_last(message));
        busy += times(microbatches_, message.need->occupancy);
      }
      offer(first + busy + last, messages.back());
    }
  }

  // Shared link: where ranks have several stages, messages of several edges take one link. Like a rank it is a machine whose
  // jobs may be interrupted. A message's head is that of its op and the op, and its tail is the way that is left.
  void shared_links(Table& head, Table& tail) {
    for (const auto& [ends, messages] : of_link_) {
      if (messages.size() <= (cost_.half_duplex ? 2U : 1U)) continue;
      std::vector<Job> jobs;
      for (const Message& message : messages) {
        const Need& need = *message.need;
        if (need.occupancy == 0.0 || is_weight_grad(need.op) || is_weight_grad(message.to)) continue;
        for (std::size_t k = 0; k < microbatches_; ++k) {
          jobs.push_back(
              {head(need.op, k) + duration(need.op), need.occupancy, need.latency + time(message.to) + tail(message.to, k)});
        }
      }
      offer(one_machine(std::move(jobs)), messages.front());
    }
  }

  // What an op needs from another stage.
  struct Message {
    const Need* need;
    std::size_t to;
  };

  void offer(double value, const Message& message) {
    const std::size_t from = stage_of(message.need->op), to = stage_of(message.to);
    offer(value, from < to ? BoundKind::LinkForward : BoundKind::LinkBackward, std::min(from, to));
  }

  [[nodiscard]] double first_departure(const Message& message) const {
    return head_[message.need->op] + duration(message.need->op);
  }
  [[nodiscard]] double after_last(const Message& message) const {
    return message.need->latency + time(message.to) + tail_[message.to];
  }
  // The time of an op alone, without what holds it afterwards.
  [[nodiscard]] double duration(std::size_t op) const {
    return cost_.duration(static_cast<std::int32_t>(stage_of(op)), static_cast<Kind>(op / stages_));
  }

  // One machine: every rank as a machine whose ops may be interrupted, each with a head and a tail of its own.
  void machines() {
    Table head(2 * stages_, microbatches_), tail(2 * stages_, microbatches_);  // of F and I
    heads(head);
    tails(tail);
    std::vector<std::vector<Job>> jobs(static_cast<std::size_t>(problem_.workers));
    for (const std::size_t op : ways_.order()) {
      for (std::size_t k = 0; k < microbatches_; ++k) {
        if (!is_weight_grad(op)) {
          jobs[rank_of(op)].push_back({head(op, k), time(op), tail(op, k)});
          continue;
        }
        double ready = 0.0;
        for (const Need& need : ways_.needs(op)) {
          if (!is_weight_grad(need.op)) ready = std::max(ready, head(need.op, k) + time(need.op) + need.flight);
        }
        jobs[rank_of(op)].push_back({ready, time(op), 0.0});
      }
    }
    idle(head, tail);
    for (std::size_t rank = 0; rank < jobs.size(); ++rank)
      offer(one_machine(std::move(jobs[rank])), BoundKind::OneMachine, rank);
    shared_links(head, tail);
  }

  [[nodiscard]] bool is_weight_grad(std::size_t op) const { return op >= w(0); }

  // Idle: a stage alone on its rank idles in any stretch of time that is longer than the ops that memory lets it run meanwhile.
  // Such stretches are those before the k-th I starts and after the k-th F has ended. Another is the round trip from the start
  // of the k-th F to that of the k-th I. The k-th F starts after the (k - A)-th I, so along a chain I, F, I, F, … of these gaps
  // no two stretches overlap. The bound is head + M·(T_F + T_I + T_W) + the greatest sum of idle time along a chain.
  void idle(Table& head, Table& tail) {
    Numbers before_i(microbatches_);
    for (std::size_t s = 0; s < stages_; ++s) {
      if (std::count(problem_.placement.begin(), problem_.placement.end(), problem_.placement[s]) > 1) continue;
      const std::size_t most = in_flight_[s];
      const double gradients = time(i(s)) + time(w(s));
      double greatest = 0.0;
      for (std::size_t k = 0; k < microbatches_; ++k) {
        const std::size_t forwards = std::min(microbatches_, most + k);
        const double forced = gradient_work_before(s, k);
        const double before_f = k >= most ? before_i[k - most] : 0.0;
        const double beginning = head(i(s), k) - head(f(s), 0) - times(forwards, time(f(s))) - times(k, gradients);
        const double trip = time(f(s)) + down_[s] - times(forwards - k, time(f(s))) - times(k, gradients) + forced;
        const double end = tail(f(s), k) - times(microbatches_ - 1 - k, time(f(s))) - times(microbatches_, gradients) + forced;
        before_i[k] = std::max({k > 0 ? before_i[k - 1] : 0.0, beginning, before_f + std::max(0.0, trip)});
        greatest = std::max({greatest, before_i[k], before_f + std::max(0.0, end)});
      }
      offer(head(f(s), 0) + times(microbatches_, time(f(s)) + gradients) + greatest, BoundKind::Idle, s);
    }
  }

  // The least time of the I and W ops that must have freed memory before the k-th F can start. It is that of the cheapest I
  // ops, and no more W ops, that free enough.
  [[nodiscard]] double gradient_work_before(std::size_t s, std::size_t k) const {
    if (k < in_flight_[s] || cost_.memory_limit.empty()) return 0.0;
    const double held = cost_.memory_forward[s];
    const double by_i = cost_.memory_input_grad[s];
    const double by_w = held - by_i;
    const double limit = cost_.memory_limit[static_cast<std::size_t>(problem_.placement[s])] + kMemoryTolerance;
    const double excess = times(k + 1, held) - limit;
    double cheapest = std::numeric_limits<double>::infinity();
    for (std::size_t gradients = k + 1 - in_flight_[s]; gradients <= k; ++gradients) {
      const double missing = excess - times(gradients, by_i);
      const double weights = missing <= 0.0 ? 0.0 : std::ceil(missing / by_w - kMemoryTolerance);
      if (weights > static_cast<double>(gradients)) continue;
      cheapest = std::min(cheapest, times(gradients, time(i(s))) + weights * time(w(s)));
    }
    return std::isfinite(cheapest) ? cheapest : 0.0;
  }

  // Computes the earliest start of the k-th F and I on each stage. Each comes after the k-th of what it needs and its message,
  // and messages are one occupancy apart. It also comes after the ops before it on its own stage. The k-th F comes after the (k
  // - A)-th I too.
  void heads(Table& head) const {
    Numbers since(ways_.count(), 0.0);  // per need: since when it is met, without what else the k-th op waits for
    for (std::size_t k = 0; k < microbatches_; ++k) {
      for (const std::size_t op : ways_.order()) {
        if (is_weight_grad(op)) continue;
        const std::size_t s = stage_of(op);
        double earliest = 0.0;
        for (const Need& need : ways_.needs(op)) {
          if (is_weight_grad(need.op)) continue;
          double& met = since[ways_.number(need)];
          if (stage_of(need.op) == s) {
            // The k-th op that needs one comes after all needed ones up to k, and after those before it of its own kind. The
            // j-th needed one comes before all of these from j on.
            met = std::max(head(need.op, k), k > 0 ? met + time(need.op) + time(op) : 0.0);
            earliest = std::max(earliest, met + time(need.op));
          } else {
            met = std::max(k > 0 ? met + need.occupancy : 0.0, head(need.op, k) + time(need.op) + need.flight);
            earliest = std::max(earliest, met);
          }
        }
        if (k > 0) earliest = std::max(earliest, head(op, k - 1) + time(op));
        if (op == f(s) && k >= in_flight_[s]) earliest = std::max(earliest, head(i(s), k - in_flight_[s]) + time(i(s)));
        head(op, k) = earliest;
      }
    }
  }

  // Computes the least time from the end of the k-th F and I on each stage to the end of the step. These are the same chains,
  // backwards.
  void tails(Table& tail) const {
    Numbers until(ways_.count(), 0.0);
    Numbers following;
    for (std::size_t op = 0; !is_weight_grad(op); ++op) following.push_back(ways_.following(op));
    for (std::size_t k = microbatches_; k-- > 0;) {
      const bool last = k + 1 == microbatches_;
      const std::size_t left = microbatches_ - k;
      for (auto next = ways_.order().rbegin(); next != ways_.order().rend(); ++next) {
        const std::size_t op = *next, s = stage_of(op);
        if (is_weight_grad(op)) continue;
        double& least = tail(op, k);  // by now the greatest of those that need it
        least = std::max(least, times(left - 1, time(op)) + times(left, following[op]));
        if (!last) least = std::max(least, time(op) + tail(op, k + 1));
        if (op == i(s) && k + in_flight_[s] < microbatches_)
          least = std::max(least, time(f(s)) + tail(f(s), k + in_flight_[s]));
        for (const Need& need : ways_.needs(op)) {
          if (is_weight_grad(need.op)) continue;
          double& after = until[ways_.number(need)];
          if (stage_of(need.op) == s) {
            after = std::max(time(op) + least, last ? 0.0 : after + time(need.op) + time(op));
          } else {
            after = std::max(after + (last || blocking_ ? 0.0 : need.occupancy), need.flight + time(op) + least);
          }
          tail(need.op, k) = std::max(tail(need.op, k), after);
        }
      }
    }
  }

  const Cost& cost_;
  const Problem& problem_;
  const std::size_t stages_, microbatches_;
  const bool blocking_;
  const Ways ways_;
  const Numbers head_, tail_;                                                    // per op, the least time before and after it
  Numbers down_;                                                                 // per stage, the least time between F and I
  std::vector<std::size_t> in_flight_;                                           // A, the most microbatches in flight per stage
  std::map<std::pair<std::size_t, std::size_t>, std::vector<Message>> of_link_;  // by the ranks that a link joins
  Bound best_{0.0, BoundKind::Load, 0};
};

}  // namespace

std::vector<double> least_tails(const Problem& problem) {
  const std::size_t stages = problem.placement.size();
  std::vector<double> tails(static_cast<std::size_t>(problem.workers), std::numeric_limits<double>::infinity());
  const Numbers each = Ways(problem, false).tails();
  for (std::size_t op = 0; op < op_of(Kind::W, 0, stages); ++op) {
    double& of_rank = tails[static_cast<std::size_t>(problem.placement[op % stages])];
    of_rank = std::min(of_rank, each[op]);
  }
  return tails;
}

Bound lower_bound(const Problem& problem) { return Bounds(problem).greatest(); }

}  // namespace adaptra::schedule
