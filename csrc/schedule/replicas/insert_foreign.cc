#include "schedule/replicas/insert_foreign.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <deque>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include "schedule/simulate/rule.h"

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
        rule_(pipeline),
        memory_(memory),
        stages_(static_cast<std::size_t>(pipeline.stages)),
        slack_(slack),
        sequence_(sorted(orders)) {
    for (const Home& home : homes) homes_[home.replica].sequence = sorted(home.orders);
    for (std::vector<double>& ends : ends_) ends.resize(stages_ * static_cast<std::size_t>(problem_.microbatches));
    for (const Row& row : problem_.rule[static_cast<std::size_t>(Kind::W)]) {
      if (row.when == When::HandedOver && problem_.hands_over) handed_over_.push_back(row.later);
    }
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
      pace_[static_cast<std::size_t>(m)] = end(Kind::F)[at(0, m)] - problem_.cost.forward[0];

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
    std::vector<unsigned> made(stages_ * static_cast<std::size_t>(problem_.microbatches), 0);  // bit_of(kind) of each
    std::vector<std::int32_t> ready(stages_);
    std::iota(ready.begin(), ready.end(), 0);
    while (!ready.empty()) {
      const auto stage = static_cast<std::size_t>(ready.back());
      ready.pop_back();
      const Order& order = orders[stage];
      for (; position[stage] < order.size(); ++position[stage]) {
        const Op& op = order[position[stage]];
        if (is_update(op.kind)) continue;
        bool is_ready = true;
        for_needs(op, [&](const Row& row, std::size_t there) { is_ready = is_ready && (made[there] & row.kinds) != 0; });
        if (!is_ready) break;
        made[at(op.stage, op.microbatch)] |= bit_of(op.kind);
        sequence.push_back(op);
        for (const Column& column : rule_.meets[static_cast<std::size_t>(op.kind)]) {
          const std::int32_t waiting = op.stage - column.offset;
          if (column.offset != 0 && waiting >= 0 && waiting < problem_.stages) ready.push_back(waiting);
        }
      }
    }
    return sequence;
  }

  // Calls `use(row, place)` for each need of an op, with the place of its stage and microbatch, see at().
  template <typename Use>
  void for_needs(const Op& op, const Use& use) const {
    for (const Column& column : rule_.needs[static_cast<std::size_t>(op.kind)]) {
      const std::int32_t stage = op.stage + column.offset, microbatch = op.microbatch + column.later;
      const bool exists = stage >= 0 && stage < problem_.stages && microbatch >= 0 && microbatch < problem_.microbatches;
      if (exists) use(column, at(stage, microbatch));
    }
  }

  [[nodiscard]] std::vector<double>& end(Kind kind) { return ends_[static_cast<std::size_t>(kind)]; }

  // Says to the hosts of a home's lost workers what comes when, and by when it must be done.
  void promise(std::int32_t home, const std::vector<std::uint8_t>& lost,
               const std::map<std::pair<std::int32_t, std::int32_t>, std::vector<std::int32_t>>& host_of,
               std::map<std::int32_t, Guests>& hosts) {
    for (std::int32_t stage = 0; stage < problem_.stages; ++stage) {
      const auto s = static_cast<std::size_t>(stage);
      if (lost[s] == 0) continue;
      const std::vector<std::int32_t>& host = host_of.at({home, stage});
      const double slack = slack_of(s);
      std::vector<double> adds(host.size());  // by when each microbatch is in its accumulator
      for (std::int32_t m = 0; m < problem_.microbatches; ++m) {
        const std::int32_t holder = host[static_cast<std::size_t>(m)];
        double from = 0.0;
        bool is_handed = false;
        for (const std::int32_t later : handed_over_) {
          const auto before = static_cast<std::size_t>(m + later);
          if (before >= host.size() || holder == host[before]) continue;
          is_handed = true;
          from = std::max(from, adds[before] + problem_.hand_over);
        }
        const double forward_by = end(Kind::F)[at(stage, m)], input_grad_by = end(Kind::I)[at(stage, m)];
        double& added = adds[static_cast<std::size_t>(m)];
        added = std::max({input_grad_by, m > 0 ? adds[static_cast<std::size_t>(m) - 1] : 0.0, from}) +
                problem_.cost.weight_grad[s] + (is_handed ? slack : 0.0);
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
      if (op.kind != Kind::W) {
        if (op.kind == Kind::F) {
          if (!make_room(worker, s)) return false;
          ++worker.held;
        }
        end(op.kind)[at(op.stage, op.microbatch)] = start(worker, op, ready, hosts);
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

  // The end that a home counts on for an op of its lost worker. W are promised to nobody in the home.
  void answer(const Op& op) {
    if (op.kind == Kind::W) return;
    const auto s = static_cast<std::size_t>(op.stage);
    const double pace = op.kind == Kind::F && s == 0 ? pace_[static_cast<std::size_t>(op.microbatch)] : 0.0;
    end(op.kind)[at(op.stage, op.microbatch)] =
        std::max(ready_at(op), pace) + problem_.cost.duration(op.stage, op.kind) + slack_of(s);
  }

  // The time at which the needs of an op are met, given the ends of all ops before it in the sequence.
  [[nodiscard]] double ready_at(const Op& op) const {
    double ready = 0.0;
    for_needs(op, [&](const Row& row, std::size_t there) {
      for (std::size_t kind = 0; kind < ends_.size(); ++kind) {
        if (!row.is_met_by(static_cast<Kind>(kind))) continue;
        const auto edge = static_cast<std::size_t>(std::min(op.stage, op.stage + row.offset));
        const double flight = row.offset < 0   ? problem_.cost.latency_forward[edge]
                              : row.offset > 0 ? problem_.cost.latency_backward[edge]
                                               : 0.0;
        ready = std::max(ready, ends_[kind][there] + flight);
      }
    });
    return ready;
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
  const CompiledRule rule_;                // between the ops of one replica
  std::vector<std::int32_t> handed_over_;  // of the microbatches whose accumulators a W takes over: how much later they are
  const std::vector<std::int32_t>& memory_;
  const std::size_t stages_;
  const double slack_;
  const Order sequence_;                     // the same of a healthy replica
  std::map<std::int32_t, Answering> homes_;  // by replica
  std::array<std::vector<double>, 2> ends_;  // of F and I, per stage and microbatch, of the replica that was timed last
  std::vector<double> pace_;                 // per microbatch: the start of the first stage's F
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
