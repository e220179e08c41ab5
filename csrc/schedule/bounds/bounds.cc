// Notation. For a stage i, T_F, T_I and T_W are how long one op keeps the stage from doing anything else. L_F and L_B are how
// long it then takes until the op's message has arrived. Without blocking, T is the op's duration and L the message's occupancy
// + latency. Where communication blocks, the sender is held until its message arrives, so L is a part of T.
//
// All arguments count ops: "the k-th op of this kind to run on this stage", whichever microbatch that is. So they hold for
// every order and every placement; microbatches need not run in order.
#include "schedule/bounds/bounds.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

namespace adaptra::schedule {
namespace {

using Numbers = std::vector<double>;

constexpr double kMemoryTolerance = 1e-9;

// One number for each op of a kind on each stage: row s, column k.
class Table {
 public:
  Table(std::size_t stages, std::size_t microbatches) : microbatches_(microbatches), values_(stages * microbatches, 0.0) {}
  double& operator()(std::size_t stage, std::size_t k) { return values_[stage * microbatches_ + k]; }

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
        t_f_(cost_.forward),
        t_i_(cost_.input_grad),
        t_w_(cost_.weight_grad),
        l_f_(stages_, 0.0),
        l_b_(stages_, 0.0),
        in_flight_(stages_, microbatches_) {
    for (std::size_t edge = 0; edge + 1 < stages_; ++edge) {
      const double forward = cost_.occupancy_forward[edge] + cost_.latency_forward[edge];
      const double backward = cost_.occupancy_backward[edge] + cost_.latency_backward[edge];
      (blocking_ ? t_f_[edge] : l_f_[edge]) += forward;
      (blocking_ ? t_i_[edge + 1] : l_b_[edge]) += backward;
    }
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
    first_ops();
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

  // Computes three times per stage i. head_, h_i, is the earliest start of a forward. down_ is the least time from the end of a
  // forward to the start of its I. tail_ is the least time after the last I. Its gradient travels on to stage 0, and some stage
  // on the way runs a W last.
  void first_ops() {
    head_.assign(stages_, 0.0);
    down_.assign(stages_, 0.0);
    tail_.assign(stages_, 0.0);
    for (std::size_t s = 1; s < stages_; ++s) head_[s] = head_[s - 1] + t_f_[s - 1] + l_f_[s - 1];
    for (std::size_t s = stages_ - 1; s-- > 0;) down_[s] = l_f_[s] + t_f_[s + 1] + down_[s + 1] + t_i_[s + 1] + l_b_[s];
    tail_[0] = t_w_[0];
    for (std::size_t s = 1; s < stages_; ++s) tail_[s] = std::max(t_w_[s], l_b_[s - 1] + t_i_[s - 1] + tail_[s - 1]);
  }

  // Load: a rank runs all its ops one after the other. That takes M·(T_F + T_I + T_W) from the earliest start of its first
  // forward.
  void load() {
    for (std::size_t rank = 0; rank < static_cast<std::size_t>(problem_.workers); ++rank) {
      double head = std::numeric_limits<double>::infinity();
      double work = 0.0;
      for (std::size_t s = 0; s < stages_; ++s) {
        if (static_cast<std::size_t>(problem_.placement[s]) != rank) continue;
        head = std::min(head, head_[s]);
        work += times(microbatches_, t_f_[s] + t_i_[s] + t_w_[s]);
      }
      offer(head + work, BoundKind::Load, rank);
    }
  }

  // Drain: a stage runs all its F and I, then the tail follows. h_i + M·(T_F + T_I) + tail_i.
  // Chain: the first F makes its round trip, then all I follow. h_i + T_F + down_i + M·T_I + tail_i.
  void drain_and_chain() {
    for (std::size_t s = 0; s < stages_; ++s) {
      offer(head_[s] + times(microbatches_, t_f_[s] + t_i_[s]) + tail_[s], BoundKind::Drain, s);
    }
    for (std::size_t s = 0; s < stages_; ++s) {
      offer(head_[s] + t_f_[s] + down_[s] + times(microbatches_, t_i_[s]) + tail_[s], BoundKind::Chain, s);
    }
  }

  // Memory: with at most A microbatches in flight, forward k + A can't start before I k has ended. So M microbatches make q + 1
  // round trips, q = floor((M - 1) / A). After the last of them r = (M - 1) mod A further I follow.
  void memory() {
    for (std::size_t s = 0; s < stages_; ++s) {
      const std::size_t trips = (microbatches_ - 1) / in_flight_[s] + 1;
      const std::size_t rest = (microbatches_ - 1) % in_flight_[s];
      const double trip = t_f_[s] + down_[s] + t_i_[s];
      offer(head_[s] + times(trips, trip) + times(rest, t_i_[s]) + tail_[s], BoundKind::Memory, s);
    }
  }

  // Link: M messages occupy an edge one after the other; on a shared edge both directions do, and a backward one is the last.
  void links() {
    for (std::size_t e = 0; e + 1 < stages_; ++e) {
      const double forward = times(microbatches_, cost_.occupancy_forward[e]);
      const double backward = times(microbatches_, cost_.occupancy_backward[e]);
      const double trip = t_f_[e + 1] + down_[e + 1];
      const double first_out = head_[e] + cost_.forward[e];
      const double first_back = head_[e + 1] + trip + cost_.input_grad[e + 1];
      const double home = cost_.latency_backward[e] + t_i_[e] + tail_[e];
      offer(first_out + forward + cost_.latency_forward[e] + trip + t_i_[e + 1] + tail_[e + 1], BoundKind::LinkForward, e);
      offer(first_back + backward + home, BoundKind::LinkBackward, e);
      if (cost_.half_duplex) offer(first_out + forward + backward + home, BoundKind::LinkBackward, e);
    }
  }

  // One machine: every rank as a machine whose ops may be interrupted, each with a head and a tail of its own.
  void machines() {
    Table head_f(stages_, microbatches_), head_i(stages_, microbatches_);
    Table tail_f(stages_, microbatches_), tail_i(stages_, microbatches_);
    heads(head_f, head_i);
    tails(tail_f, tail_i);
    std::vector<std::vector<Job>> jobs(static_cast<std::size_t>(problem_.workers));
    for (std::size_t s = 0; s < stages_; ++s) {
      std::vector<Job>& machine = jobs[static_cast<std::size_t>(problem_.placement[s])];
      for (std::size_t k = 0; k < microbatches_; ++k) {
        machine.push_back({head_f(s, k), t_f_[s], tail_f(s, k)});
        machine.push_back({head_i(s, k), t_i_[s], tail_i(s, k)});
        machine.push_back({head_i(s, k) + t_i_[s], t_w_[s], 0.0});
      }
    }
    idle(head_f, head_i, tail_f);
    for (std::size_t rank = 0; rank < jobs.size(); ++rank)
      offer(one_machine(std::move(jobs[rank])), BoundKind::OneMachine, rank);
  }

  // Idle: a stage alone on its rank idles in any stretch of time that is longer than the ops that memory lets it run meanwhile.
  // Such stretches are those before the k-th I starts and after the k-th F has ended. Another is the round trip from the start
  // of the k-th F to that of the k-th I. The k-th F starts after the (k - A)-th I, so along a chain I, F, I, F, … of these gaps
  // no two stretches overlap. The bound is head + M·(T_F + T_I + T_W) + the greatest sum of idle time along a chain.
  void idle(Table& head_f, Table& head_i, Table& tail_f) {
    Numbers before_i(microbatches_);
    for (std::size_t s = 0; s < stages_; ++s) {
      if (std::count(problem_.placement.begin(), problem_.placement.end(), problem_.placement[s]) > 1) continue;
      const std::size_t most = in_flight_[s];
      const double gradients = t_i_[s] + t_w_[s];
      double greatest = 0.0;
      for (std::size_t k = 0; k < microbatches_; ++k) {
        const std::size_t forwards = std::min(microbatches_, most + k);
        const double forced = gradient_work_before(s, k);
        const double before_f = k >= most ? before_i[k - most] : 0.0;
        const double beginning = head_i(s, k) - head_f(s, 0) - times(forwards, t_f_[s]) - times(k, gradients);
        const double trip = t_f_[s] + down_[s] - times(forwards - k, t_f_[s]) - times(k, gradients) + forced;
        const double end = tail_f(s, k) - times(microbatches_ - 1 - k, t_f_[s]) - times(microbatches_, gradients) + forced;
        before_i[k] = std::max({k > 0 ? before_i[k - 1] : 0.0, beginning, before_f + std::max(0.0, trip)});
        greatest = std::max({greatest, before_i[k], before_f + std::max(0.0, end)});
      }
      offer(head_f(s, 0) + times(microbatches_, t_f_[s] + gradients) + greatest, BoundKind::Idle, s);
    }
  }

  // The least time of the I and W ops that must have freed memory before the k-th F can start. It is that of the cheapest i I
  // ops and w <= i W ops that free enough.
  [[nodiscard]] double gradient_work_before(std::size_t s, std::size_t k) const {
    if (k < in_flight_[s] || cost_.memory_limit.empty()) return 0.0;
    const double held = cost_.memory_forward[s];
    const double by_i = cost_.memory_input_grad[s];
    const double by_w = held - by_i;
    const double limit = cost_.memory_limit[static_cast<std::size_t>(problem_.placement[s])] + kMemoryTolerance;
    const double excess = times(k + 1, held) - limit;
    double cheapest = std::numeric_limits<double>::infinity();
    for (std::size_t i = k + 1 - in_flight_[s]; i <= k; ++i) {
      const double missing = excess - times(i, by_i);
      const double w = missing <= 0.0 ? 0.0 : std::ceil(missing / by_w - kMemoryTolerance);
      if (w <= static_cast<double>(i)) cheapest = std::min(cheapest, times(i, t_i_[s]) + w * t_w_[s]);
    }
    return std::isfinite(cheapest) ? cheapest : 0.0;
  }

  // Computes the earliest start of the k-th F and I on each stage. Each comes after the k-th on the neighbour and its message,
  // and messages are one occupancy apart. It also comes after the ops before it on its own stage. The k-th F comes after the (k
  // - A)-th I too.
  void heads(Table& head_f, Table& head_i) const {
    Numbers arrived_f(stages_, 0.0), arrived_i(stages_, 0.0), round(stages_, 0.0);
    for (std::size_t k = 0; k < microbatches_; ++k) {
      for (std::size_t s = 0; s < stages_; ++s) {
        double& head = head_f(s, k);
        if (s > 0) {
          const double spaced = k > 0 ? arrived_f[s] + cost_.occupancy_forward[s - 1] : 0.0;
          head = arrived_f[s] = std::max(spaced, head_f(s - 1, k) + t_f_[s - 1] + l_f_[s - 1]);
        }
        if (k > 0) head = std::max(head, head_f(s, k - 1) + t_f_[s]);
        if (k >= in_flight_[s]) head = std::max(head, head_i(s, k - in_flight_[s]) + t_i_[s]);
      }
      for (std::size_t s = stages_; s-- > 0;) {
        double& head = head_i(s, k);
        // Between the j-th F and the k-th I lie all F from j to k and all I from j to k - 1.
        round[s] = std::max(head_f(s, k), k > 0 ? round[s] + t_f_[s] + t_i_[s] : 0.0);
        head = round[s] + t_f_[s];
        if (s + 1 < stages_) {
          const double spaced = k > 0 ? arrived_i[s] + cost_.occupancy_backward[s] : 0.0;
          arrived_i[s] = std::max(spaced, head_i(s + 1, k) + t_i_[s + 1] + l_b_[s]);
          head = std::max(head, arrived_i[s]);
        }
        if (k > 0) head = std::max(head, head_i(s, k - 1) + t_i_[s]);
      }
    }
  }

  // Computes the least time from the end of the k-th F and I on each stage to the end of the step. These are the same chains,
  // backwards.
  void tails(Table& tail_f, Table& tail_i) const {
    Numbers sent_f(stages_, 0.0), sent_i(stages_, 0.0), round(stages_, 0.0);
    for (std::size_t k = microbatches_; k-- > 0;) {
      const bool last = k + 1 == microbatches_;
      const std::size_t left = microbatches_ - k;
      for (std::size_t s = 0; s < stages_; ++s) {
        double& tail = tail_i(s, k);
        tail = times(left - 1, t_i_[s]) + times(left, t_w_[s]);
        if (s > 0) {
          sent_i[s] = sent_i[s] + (last || blocking_ ? 0.0 : cost_.occupancy_backward[s - 1]);
          sent_i[s] = std::max(sent_i[s], l_b_[s - 1] + t_i_[s - 1] + tail_i(s - 1, k));
          tail = std::max(tail, sent_i[s]);
        }
        if (!last) tail = std::max(tail, t_i_[s] + tail_i(s, k + 1));
        if (k + in_flight_[s] < microbatches_) tail = std::max(tail, t_f_[s] + tail_f(s, k + in_flight_[s]));
      }
      for (std::size_t s = stages_; s-- > 0;) {
        double& tail = tail_f(s, k);
        round[s] = std::max(t_i_[s] + tail_i(s, k), last ? 0.0 : round[s] + t_f_[s] + t_i_[s]);
        tail = std::max(round[s], times(left - 1, t_f_[s]) + times(left, t_i_[s] + t_w_[s]));
        if (s + 1 < stages_) {
          sent_f[s] = sent_f[s] + (last || blocking_ ? 0.0 : cost_.occupancy_forward[s]);
          sent_f[s] = std::max(sent_f[s], l_f_[s] + t_f_[s + 1] + tail_f(s + 1, k));
          tail = std::max(tail, sent_f[s]);
        }
        if (!last) tail = std::max(tail, t_f_[s] + tail_f(s, k + 1));
      }
    }
  }

  const Cost& cost_;
  const Problem& problem_;
  const std::size_t stages_, microbatches_;
  const bool blocking_;
  Numbers t_f_, t_i_, t_w_, l_f_, l_b_;
  std::vector<std::size_t> in_flight_;  // A, the most microbatches in flight per stage
  Numbers head_, down_, tail_;
  Bound best_{0.0, BoundKind::Load, 0};
};

}  // namespace

std::vector<double> least_tails(const Problem& problem) {
  const Cost& cost = problem.cost;
  std::vector<double> tails(static_cast<std::size_t>(problem.workers), std::numeric_limits<double>::infinity());
  double tail = 0.0;  // the recurrence of first_ops()
  for (std::size_t s = 0; s < cost.forward.size(); ++s) {
    tail = s == 0 ? cost.weight_grad[0]
                  : std::max(cost.weight_grad[s],
                             cost.occupancy_backward[s - 1] + cost.latency_backward[s - 1] + cost.input_grad[s - 1] + tail);
    double& of_rank = tails[static_cast<std::size_t>(problem.placement[s])];
    of_rank = std::min(of_rank, tail);
  }
  return tails;
}

Bound lower_bound(const Problem& problem) { return Bounds(problem).greatest(); }

}  // namespace adaptra::schedule
