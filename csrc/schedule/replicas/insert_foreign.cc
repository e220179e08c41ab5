#include "schedule/replicas/insert_foreign.h"

#include <algorithm>
#include <cstddef>
#include <deque>
#include <limits>
#include <map>
#include <utility>

namespace adaptra::schedule {
namespace {

constexpr double kTolerance = 1e-9;
constexpr double kNever = std::numeric_limits<double>::infinity();

// A foreign microbatch in its host: when its inputs are there, and the ends that its home counts on.
struct Guest {
  std::int32_t home;
  std::int32_t microbatch;
  double forward_from, forward_by;
  double input_grad_from, input_grad_by;
  double weight_grad_from, weight_grad_by;  // of an accumulator that is handed over; any time otherwise
};

class Inserter {
 public:
  Inserter(const Problem& pipeline, const std::vector<Order>& orders, const std::vector<Home>& homes,
           const std::vector<std::int32_t>& memory, double slack)
      : problem_(pipeline),
        memory_(memory),
        stages_(static_cast<std::size_t>(pipeline.stages)),
        slack_(slack),
        sequence_(sorted(orders)) {
    for (const Home& home : homes) homes_[home.replica].sequence = sorted(home.orders);
    forward_end_.resize(stages_ * static_cast<std::size_t>(problem_.microbatches));
    input_grad_end_ = forward_end_;
  }

  [[nodiscard]] std::optional<Insertion> run(const std::vector<Foreign>& foreign) {
    for (const Foreign& one : foreign) {
      std::vector<std::uint8_t>& lost = homes_.at(one.home).lost;
      lost.resize(stages_, 0);
      lost[static_cast<std::size_t>(one.stage)] = 1;
    }
    // Of a lost first stage the inputs are there from the start. They are asked for at the pace of a healthy one.
    if (!time_replica(sequence_, {}, {}, nullptr)) return std::nullopt;
    pace_.resize(static_cast<std::size_t>(problem_.microbatches));
    for (std::int32_t m = 0; m < problem_.microbatches; ++m)
      pace_[static_cast<std::size_t>(m)] = forward_end_[at(0, m)] - problem_.cost.forward[0];

    std::map<std::int32_t, Guests> hosts;
    std::map<std::pair<std::int32_t, std::int32_t>, std::vector<std::int32_t>> host_of;
    for (const Foreign& one : foreign) {
      std::vector<std::int32_t>& of_stage = host_of[{one.home, one.stage}];
      of_stage.resize(static_cast<std::size_t>(problem_.microbatches), 0);
      of_stage[static_cast<std::size_t>(one.microbatch)] = one.host;
      hosts[one.host].resize(stages_);
    }
    for (const auto& [replica, home] : homes_) {
      if (!time_replica(home.sequence, home.lost, {}, nullptr)) return std::nullopt;
      promise(replica, home.lost, host_of, hosts);
    }
    Insertion found{0.0, {}};
    for (const auto& [host, guests] : hosts) {
      std::vector<HostOrder> orders;
      if (!time_replica(sequence_, {}, guests, &orders)) return std::nullopt;
      for (HostOrder& one : orders) {
        one.replica = host;
        for (Op& op : one.order) {
          if (op.replica < 0) op.replica = host;
        }
        found.hosts.push_back(std::move(one));
      }
    }
    for (const std::vector<double>& firsts : firsts_) {
      for (std::size_t stage = 0; stage < stages_; ++stage) {
        const double end = reduced_[stage] + problem_.cost.reduce[stage] + problem_.cost.step[stage];
        found.period = std::max(found.period, end - firsts[stage]);
      }
    }
    return found;
  }

 private:
  struct Answering {
    Order sequence;                  // the home's ops, each behind its needs
    std::vector<std::uint8_t> lost;  // per stage
  };
  using Guests = std::vector<std::vector<Guest>>;  // per stage

  // One worker while its replica is timed.
  struct Worker {
    double free = 0.0;
    double owed = 0.0;                    // time that guests took and that no skipped W has given back yet
    std::int32_t held = 0;                // microbatches from the start of F to the end of W
    std::deque<std::int32_t> own;         // microbatches whose W is due
    std::deque<const Guest*> foreign;     // the same of guests
    std::vector<const Guest*> forwards;   // guests by the time at which their F may start
    std::vector<const Guest*> backwards;  // the same of I
    std::size_t next_forward = 0, next_backward = 0;
    double first = kNever;  // the start of its first op
    Order order;
  };

  [[nodiscard]] std::size_t at(std::int32_t stage, std::int32_t microbatch) const {
    return static_cast<std::size_t>(stage) * static_cast<std::size_t>(problem_.microbatches) +
           static_cast<std::size_t>(microbatch);
  }

  // Brings the ops of all workers into one sequence in which each stands behind its needs.
  [[nodiscard]] Order sorted(const std::vector<Order>& orders) const {
    Order sequence;
    std::vector<std::size_t> position(stages_, 0);
    std::vector<std::uint8_t> forward(stages_ * static_cast<std::size_t>(problem_.microbatches), 0), backward = forward;
    std::vector<std::size_t> ready(stages_);
    for (std::size_t stage = 0; stage < stages_; ++stage) ready[stage] = stage;
    while (!ready.empty()) {
      const std::size_t stage = ready.back();
      ready.pop_back();
      const Order& order = orders[stage];
      for (; position[stage] < order.size(); ++position[stage]) {
        const Op& op = order[position[stage]];
        const std::size_t here = at(op.stage, op.microbatch);
        const auto per_stage = static_cast<std::size_t>(problem_.microbatches);
        if (op.kind == Kind::F) {
          if (stage > 0 && forward[here - per_stage] == 0) break;
          forward[here] = 1;
          if (stage + 1 < stages_) ready.push_back(stage + 1);
        } else if (op.kind == Kind::I) {
          if (stage + 1 < stages_ && backward[here + per_stage] == 0) break;
          backward[here] = 1;
          if (stage > 0) ready.push_back(stage - 1);
        }
        if (!is_update(op.kind)) sequence.push_back(op);
      }
    }
    return sequence;
  }

  // Says to the hosts of a home's lost workers what comes when, and by when it must be done.
  void promise(std::int32_t home, const std::vector<std::uint8_t>& lost,
               const std::map<std::pair<std::int32_t, std::int32_t>, std::vector<std::int32_t>>& host_of,
               std::map<std::int32_t, Guests>& hosts) {
    for (std::int32_t stage = 0; stage < problem_.stages; ++stage) {
      const auto s = static_cast<std::size_t>(stage);
      if (lost[s] == 0) continue;
      const std::vector<std::int32_t>& host = host_of.at({home, stage});
      const double slack = slack_of(s);
      double added = 0.0;  // by then the accumulator has the microbatches before
      for (std::int32_t m = 0; m < problem_.microbatches; ++m) {
        const std::int32_t holder = host[static_cast<std::size_t>(m)];
        const bool is_handed = problem_.hands_over && m > 0 && holder != host[static_cast<std::size_t>(m) - 1];
        const double forward_by = forward_end_[at(stage, m)], input_grad_by = input_grad_end_[at(stage, m)];
        const double from = is_handed ? added + problem_.hand_over : 0.0;
        added = std::max({input_grad_by, added, from}) + problem_.cost.weight_grad[s] + (is_handed ? slack : 0.0);
        hosts.at(holder)[s].push_back({home, m, forward_by - problem_.cost.forward[s] - slack, forward_by,
                                       input_grad_by - problem_.cost.input_grad[s] - slack, input_grad_by, from,
                                       problem_.hands_over ? added : kNever});
      }
    }
  }

  [[nodiscard]] double slack_of(std::size_t stage) const {
    return slack_ * (problem_.cost.forward[stage] + problem_.cost.input_grad[stage] + problem_.cost.weight_grad[stage]);
  }

  // Times the ops of one replica. With `lost`, its workers of these stages answer by their promises. With `guests`, these are
  // inserted. False if memory or a promise was not kept.
  bool time_replica(const Order& sequence, const std::vector<std::uint8_t>& lost, const Guests& guests,
                    std::vector<HostOrder>* orders) {
    std::vector<Worker> workers(stages_);
    for (std::size_t stage = 0; stage < guests.size(); ++stage) invite(workers[stage], guests[stage]);
    for (const Op& op : sequence) {
      const auto s = static_cast<std::size_t>(op.stage);
      Worker& worker = workers[s];
      if (!lost.empty() && lost[s] != 0) {
        answer(op);
        continue;
      }
      const double ready = ready_at(op);
      const bool hosts = !worker.forwards.empty();
      if (hosts && !insert_before(worker, op, ready)) return false;
      if (op.kind == Kind::F) {
        if (!make_room(worker, s)) return false;
        ++worker.held;
        forward_end_[at(op.stage, op.microbatch)] = start(worker, op, ready, hosts);
      } else if (op.kind == Kind::I) {
        input_grad_end_[at(op.stage, op.microbatch)] = start(worker, op, ready, hosts);
      } else {
        worker.own.push_back(op.microbatch);
        if (worker.owed > 0.0) {
          worker.owed -= problem_.cost.weight_grad[s];
        } else {
          weight_grad(worker, s);
        }
      }
    }
    std::vector<double>& firsts = firsts_.emplace_back(stages_, kNever);
    for (std::size_t s = 0; s < stages_; ++s) {
      Worker& worker = workers[s];
      for (std::optional<Wanted> wanted = earliest(worker); wanted; wanted = earliest(worker)) {
        if (!insert(worker, s, *wanted)) return false;
      }
      while (!worker.own.empty() || !worker.foreign.empty()) weight_grad(worker, s);
      if (lost.empty() || lost[s] == 0) {
        firsts[s] = worker.first;
        reduced_[s] = std::max(reduced_[s], worker.free);
      }
      if (orders == nullptr || worker.forwards.empty()) continue;
      const auto stage = static_cast<std::int32_t>(s);
      for (const Kind kind : {Kind::Reduce, Kind::Step}) worker.order.push_back({-1, stage, kind, 0});
      orders->push_back({0, stage, std::move(worker.order)});
    }
    return !is_late_;
  }

  static void invite(Worker& worker, const std::vector<Guest>& guests) {
    for (const Guest& guest : guests) {
      worker.forwards.push_back(&guest);
      worker.backwards.push_back(&guest);
    }
    std::stable_sort(worker.forwards.begin(), worker.forwards.end(),
                     [](const Guest* a, const Guest* b) { return a->forward_from < b->forward_from; });
    std::stable_sort(worker.backwards.begin(), worker.backwards.end(),
                     [](const Guest* a, const Guest* b) { return a->input_grad_from < b->input_grad_from; });
  }

  // The end that a home counts on for an op of its lost worker.
  void answer(const Op& op) {
    const auto s = static_cast<std::size_t>(op.stage);
    const std::size_t here = at(op.stage, op.microbatch);
    if (op.kind == Kind::F) {
      const double from = s == 0 ? pace_[static_cast<std::size_t>(op.microbatch)] : ready_at(op);
      forward_end_[here] = from + problem_.cost.forward[s] + slack_of(s);
    } else if (op.kind == Kind::I) {
      input_grad_end_[here] = std::max(ready_at(op), forward_end_[here]) + problem_.cost.input_grad[s] + slack_of(s);
    }
  }

  [[nodiscard]] double ready_at(const Op& op) const {
    const auto s = static_cast<std::size_t>(op.stage);
    if (op.kind == Kind::F)
      return s == 0 ? 0.0 : forward_end_[at(op.stage - 1, op.microbatch)] + problem_.cost.latency_forward[s - 1];
    if (op.kind == Kind::I) {
      return s + 1 == stages_ ? forward_end_[at(op.stage, op.microbatch)]
                              : input_grad_end_[at(op.stage + 1, op.microbatch)] + problem_.cost.latency_backward[s];
    }
    return 0.0;  // W stands behind its I on the same worker
  }

  double run(Worker& worker, double ready, double duration) {
    const double begin = std::max(worker.free, ready);
    worker.first = std::min(worker.first, begin);
    worker.free = begin + duration;
    return worker.free;
  }

  double start(Worker& worker, const Op& op, double ready, bool hosts) {
    if (hosts) worker.order.push_back({-1, op.stage, op.kind, op.microbatch});
    return run(worker, ready, problem_.cost.duration(op.stage, op.kind));
  }

  // Runs the W that is due first, own ones before those of guests.
  void weight_grad(Worker& worker, std::size_t s) {
    if (worker.own.empty()) {
      guest_weight_grad(worker, s);
      return;
    }
    if (!worker.forwards.empty()) {
      worker.order.push_back({-1, static_cast<std::int32_t>(s), Kind::W, worker.own.front()});
    }
    worker.own.pop_front();
    run(worker, 0.0, problem_.cost.weight_grad[s]);
    --worker.held;
  }

  void guest_weight_grad(Worker& worker, std::size_t s) {
    const Guest& guest = *worker.foreign.front();
    worker.foreign.pop_front();
    worker.order.push_back({guest.home, static_cast<std::int32_t>(s), Kind::W, guest.microbatch});
    keep(run(worker, guest.weight_grad_from, problem_.cost.weight_grad[s]), guest.weight_grad_by);
    --worker.held;
  }

  void keep(double end, double by) { is_late_ = is_late_ || end > by + kTolerance * (1.0 + by); }

  // Runs W that are due until another microbatch has room.
  bool make_room(Worker& worker, std::size_t s) {
    while (worker.held >= memory_[s]) {
      if (worker.own.empty() && worker.foreign.empty()) return false;
      weight_grad(worker, s);
    }
    return true;
  }

  struct Wanted {
    const Guest* guest;
    Kind kind;  // F, I, or W of an accumulator that is handed over
    double from, by;
  };

  // The op of a guest that is wanted first.
  [[nodiscard]] std::optional<Wanted> earliest(const Worker& worker) const {
    std::optional<Wanted> found;
    const auto offer = [&found](const Wanted& one) {
      if (!found || one.by < found->by) found = one;
    };
    if (problem_.hands_over && !worker.foreign.empty()) {
      const Guest* guest = worker.foreign.front();
      offer({guest, Kind::W, guest->weight_grad_from, guest->weight_grad_by});
    }
    if (worker.next_forward < worker.forwards.size()) {
      const Guest* guest = worker.forwards[worker.next_forward];
      offer({guest, Kind::F, guest->forward_from, guest->forward_by});
    }
    if (worker.next_backward < worker.backwards.size()) {
      const Guest* guest = worker.backwards[worker.next_backward];
      offer({guest, Kind::I, guest->input_grad_from, guest->input_grad_by});
    }
    return found;
  }

  // Inserts the guests' ops that are better run before the worker's next own op.
  bool insert_before(Worker& worker, const Op& op, double ready) {
    const auto s = static_cast<std::size_t>(op.stage);
    const bool skipped = op.kind == Kind::W && worker.owed > 0.0;
    const double duration = skipped ? 0.0 : problem_.cost.duration(op.stage, op.kind);
    for (;;) {
      const std::optional<Wanted> wanted = earliest(worker);
      if (!wanted) return true;
      const double takes = problem_.cost.duration(op.stage, wanted->kind);
      const double own = std::max(worker.free, ready);
      const bool fits = std::max(worker.free, wanted->from) + takes <= own + kTolerance;
      const bool takes_turn = op.kind == Kind::W && wanted->from <= own;
      const bool is_urgent = std::max(own + duration, wanted->from) + takes > wanted->by + kTolerance;
      if (!fits && !takes_turn && !is_urgent) return true;
      if (!insert(worker, s, *wanted)) return false;
      worker.owed += std::max(0.0, worker.free - std::max(own, ready));
    }
  }

  bool insert(Worker& worker, std::size_t s, const Wanted& wanted) {
    const auto stage = static_cast<std::int32_t>(s);
    if (wanted.kind == Kind::W) {
      guest_weight_grad(worker, s);
      return !is_late_;
    }
    if (wanted.kind == Kind::F) {
      if (!make_room(worker, s)) return false;
      ++worker.held;
      ++worker.next_forward;
    } else {
      ++worker.next_backward;
    }
    worker.order.push_back({wanted.guest->home, stage, wanted.kind, wanted.guest->microbatch});
    keep(run(worker, wanted.from, problem_.cost.duration(stage, wanted.kind)), wanted.by);
    if (wanted.kind == Kind::I) worker.foreign.push_back(wanted.guest);
    return !is_late_;
  }

  const Problem& problem_;
  const std::vector<std::int32_t>& memory_;
  const std::size_t stages_;
  const double slack_;
  const Order sequence_;                              // the same of a healthy replica
  std::map<std::int32_t, Answering> homes_;           // by replica
  std::vector<double> forward_end_, input_grad_end_;  // per stage and microbatch, of the replica that was timed last
  std::vector<double> pace_;                          // per microbatch: the start of the first stage's F
  std::vector<double> reduced_ = std::vector<double>(stages_, 0.0);  // per stage: when the last replica's W have ended
  std::vector<std::vector<double>> firsts_;  // per replica that was timed, per stage: the start of the first op
  bool is_late_ = false;                     // whether a promise was not kept
};

}  // namespace

std::optional<Insertion> insert_foreign(const Problem& pipeline, const std::vector<Order>& orders,
                                        const std::vector<Home>& homes, const std::vector<Foreign>& foreign,
                                        const std::vector<std::int32_t>& memory, double slack) {
  return Inserter(pipeline, orders, homes, memory, slack).run(foreign);
}

}  // namespace adaptra::schedule
