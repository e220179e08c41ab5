// The extension adaptra._C. Only the files bindings*.cc know nanobind. Each concern has one bind_… function. How
// Python's Program, Case and RULE become plain numbers is written once, at the top.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "bindings_delegate.h"
#include "bindings_liveness.h"
#include "late_threads.h"
#include "schedule/bounds/bounds.h"
#include "schedule/replicas/insert_foreign.h"
#include "schedule/replicas/network.h"
#include "schedule/replicas/search_period.h"
#include "schedule/search/search_orders.h"
#include "schedule/search/spare_memory.h"
#include "schedule/simulate/orders.h"
#include "schedule/simulate/problem.h"
#include "schedule/simulate/simulator.h"
#include "weighted_sum.h"

namespace nb = nanobind;
namespace schedule = adaptra::schedule;

namespace {

// The members of adaptra.program.Kind that occupy a worker, looked up once per call: an enum member is one object, so comparing
// addresses is enough.
class Kinds {
 public:
  Kinds() {
    const nb::object kind = nb::module_::import_("adaptra.program").attr("Kind");
    for (const auto& [name, value] : kNames) members_[static_cast<std::size_t>(value)] = kind.attr(name);
  }

  // False for communication kinds.
  bool find(PyObject* member, schedule::Kind& kind) const {
    for (const auto& [name, value] : kNames) {
      if (members_[static_cast<std::size_t>(value)].ptr() == member) {
        kind = value;
        return true;
      }
    }
    return false;
  }

  [[nodiscard]] nb::handle member(schedule::Kind kind) const { return members_[static_cast<std::size_t>(kind)]; }

 private:
  using Kind = schedule::Kind;
  static constexpr std::array<std::pair<const char*, Kind>, schedule::kKinds> kNames = {
      {{"F", Kind::F}, {"I", Kind::I}, {"W", Kind::W}, {"B", Kind::B}, {"REDUCE", Kind::Reduce}, {"STEP", Kind::Step}}};
  std::array<nb::object, schedule::kKinds> members_;
};

std::int32_t to_index(PyObject* value) {
  const long index = PyLong_AsLong(value);
  if (index == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  if (index < 0 || index > INT32_MAX) throw std::invalid_argument("a stage or microbatch number is negative or too large");
  return static_cast<std::int32_t>(index);
}

// The place at which instances of a class with `__slots__` keep an attribute.
class Slot {
 public:
  Slot(nb::handle type, const char* name) {
    const nb::object descriptor = type.attr(name);
    if (!PyObject_TypeCheck(descriptor.ptr(), &PyMemberDescr_Type)) {
      throw std::logic_error(std::string("no slot is named ") + name);
    }
    offset_ = reinterpret_cast<PyMemberDescrObject*>(descriptor.ptr())->d_member->offset;
  }

  // The attribute of an instance.
  [[nodiscard]] PyObject* of(nb::handle object) const {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object.ptr()) + offset_);
  }

  // Sets the attribute of an instance whose slot is empty.
  void fill(nb::handle object, nb::handle value) const {
    *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object.ptr()) + offset_) = value.inc_ref().ptr();
  }

 private:
  Py_ssize_t offset_;
};

// Orders outside Python, so that converting and simulating are two calls, timed apart.
struct Orders {
  std::vector<schedule::Order> orders;
};

// adaptra.program.Program.orders without communication ops.
Orders to_orders(const nb::tuple& orders) {
  const Kinds kinds;
  const nb::object op_type = nb::module_::import_("adaptra.program").attr("Op");
  const Slot stage(op_type, "stage"), kind_slot(op_type, "kind"), microbatch(op_type, "microbatch"),
      replica(op_type, "replica");
  Orders converted;
  converted.orders.reserve(orders.size());
  for (const nb::handle item : orders) {
    schedule::Order& ops = converted.orders.emplace_back();
    ops.reserve(nb::len(item));
    for (const nb::handle op : item) {
      if (!op.type().is(op_type)) throw std::invalid_argument("orders: expected ops");
      schedule::Kind kind;
      if (!kinds.find(kind_slot.of(op), kind)) continue;
      ops.push_back({to_index(replica.of(op)), to_index(stage.of(op)), kind, to_index(microbatch.of(op))});
    }
  }
  return converted;
}

// Keeps Python from collecting garbage. Many objects made at once would start a collection through all the objects of torch.
class WithoutCollecting {
 public:
  WithoutCollecting() = default;
  WithoutCollecting(const WithoutCollecting&) = delete;
  WithoutCollecting& operator=(const WithoutCollecting&) = delete;
  ~WithoutCollecting() {
    if (was_enabled_) PyGC_Enable();
  }

 private:
  const bool was_enabled_ = PyGC_Disable() != 0;
};

// Makes Python's ops: makes each Op and fills its slots directly. Its constructor has nothing to check, yet takes ten times as
// long, a tenth of a second for 100,000 ops. An Op refers to nothing that refers to it, so Python need not look for garbage
// among them.
class OpMaker {
 public:
  // The ops of an order, all of one replica if that is given; without Reduce and Step if `computed`.
  nb::tuple make(const schedule::Order& order, std::optional<std::int32_t> replica, bool computed) {
    const auto count =
        computed ? std::count_if(order.begin(), order.end(), [](const auto& op) { return !schedule::is_update(op.kind); })
                 : static_cast<std::ptrdiff_t>(order.size());
    const auto ops = nb::steal<nb::tuple>(PyTuple_New(count));
    if (!ops.is_valid()) throw nb::python_error();
    Py_ssize_t index = 0;
    for (const schedule::Op& op : order) {
      if (computed && schedule::is_update(op.kind)) continue;
      PyObject* const made = allocate_(reinterpret_cast<PyTypeObject*>(type_.ptr()), 0);
      if (made == nullptr) throw nb::python_error();
      PyTuple_SET_ITEM(ops.ptr(), index++, made);
      PyObject_GC_UnTrack(made);
      stage_.fill(made, number(op.stage));
      kind_.fill(made, kinds_.member(op.kind));
      microbatch_.fill(made, number(op.microbatch));
      lane_.fill(made, nb::none());
      replica_.fill(made, number(replica.value_or(op.replica)));
    }
    return ops;
  }

 private:
  nb::handle number(std::int32_t value) {
    const auto index = static_cast<std::size_t>(value);
    while (numbers_.size() <= index) numbers_.emplace_back(numbers_.size());
    return numbers_[index];
  }

  const WithoutCollecting guard_;
  const Kinds kinds_;
  const nb::object type_ = nb::module_::import_("adaptra.program").attr("Op");
  const allocfunc allocate_ =
      reinterpret_cast<allocfunc>(PyType_GetSlot(reinterpret_cast<PyTypeObject*>(type_.ptr()), Py_tp_alloc));
  const Slot stage_{type_, "stage"}, kind_{type_, "kind"}, microbatch_{type_, "microbatch"}, lane_{type_, "lane"},
      replica_{type_, "replica"};
  std::vector<nb::int_> numbers_;
};

std::vector<double> numbers(nb::handle object, const char* name) {
  return nb::cast<std::vector<double>>(nb::getattr(object, name));
}

// adaptra.simulation.cost.CostModel.
schedule::Cost to_cost(nb::handle model) {
  schedule::Cost cost;
  cost.forward = numbers(model, "forward");
  cost.input_grad = numbers(model, "input_grad");
  cost.weight_grad = numbers(model, "weight_grad");
  cost.step = numbers(model, "update");
  cost.reduce.assign(cost.step.size(), 0.0);
  cost.latency_forward = numbers(model, "latency_forward");
  cost.latency_backward = numbers(model, "latency_backward");
  cost.occupancy_forward = numbers(model, "occupancy_forward");
  cost.occupancy_backward = numbers(model, "occupancy_backward");
  cost.half_duplex = nb::cast<bool>(nb::getattr(model, "half_duplex"));
  const auto blocking = nb::cast<std::string>(nb::getattr(nb::getattr(model, "blocking"), "value"));
  cost.blocking = blocking == "none"   ? schedule::Blocking::None
                  : blocking == "send" ? schedule::Blocking::Send
                                       : schedule::Blocking::Both;
  cost.memory_forward = numbers(model, "memory_forward");
  cost.memory_input_grad = numbers(model, "memory_input_grad");
  const nb::object limit = nb::getattr(model, "memory_limit");
  if (!limit.is_none()) cost.memory_limit = nb::cast<std::vector<double>>(limit);
  return cost;
}

// adaptra.program.dependencies.RULE without the rows of messages.
schedule::Rule to_rule(const nb::dict& table) {
  const Kinds kinds;
  const nb::object when = nb::module_::import_("adaptra.program.dependencies").attr("When");
  const std::array<nb::object, 3> whens = {when.attr("ALWAYS"), when.attr("HANDED_OVER"), when.attr("CHANGING")};
  schedule::Rule rule;
  for (std::size_t kind = 0; kind < rule.size(); ++kind) {
    for (const nb::handle given : nb::cast<nb::tuple>(table[kinds.member(static_cast<schedule::Kind>(kind))])) {
      const auto fields = nb::cast<nb::tuple>(given);  // a named tuple: offset, kinds, later, when
      schedule::Row row{nb::cast<std::int32_t>(fields[0]), 0, nb::cast<std::int32_t>(fields[2]), schedule::When::Always};
      for (const nb::handle met_by : nb::cast<nb::tuple>(fields[1])) {
        schedule::Kind found;
        if (!kinds.find(met_by.ptr(), found) || schedule::is_update(found))
          throw std::invalid_argument("rule: expected rows of compute ops, met by compute ops");
        row.kinds |= schedule::bit_of(found);
      }
      while (!whens.at(static_cast<std::size_t>(row.when)).is(fields[3]))
        row.when = static_cast<schedule::When>(static_cast<int>(row.when) + 1);
      rule[kind].push_back(row);
    }
    if (rule[kind].size() > schedule::kMostNeeds) throw std::invalid_argument("rule: too many rows of a kind");
  }
  return rule;
}

// `owner` is an adaptra.program.Program or an adaptra.simulation.case.Case: both have a placement and microbatches.
schedule::Problem to_pipeline(nb::handle owner, nb::handle model, const nb::dict& rule) {
  schedule::Cost cost = to_cost(model);
  auto placement = nb::cast<std::vector<std::int32_t>>(nb::getattr(owner, "placement"));
  if (placement.size() != cost.forward.size())
    throw std::invalid_argument("the placement and the cost model have different numbers of stages");
  const auto microbatches = nb::cast<std::int32_t>(nb::getattr(owner, "microbatches"));
  return schedule::pipeline_of(to_rule(rule), std::move(cost), microbatches, std::move(placement));
}

// adaptra.simulation.case.Case with a routing: the holder of each (replica, stage, microbatch), the replica of each worker, and
// the live workers of each stage.
schedule::Problem to_problem(nb::handle planning_case, std::vector<std::int32_t> holder, std::vector<std::int32_t> home,
                             std::vector<std::vector<std::int32_t>> columns, const nb::dict& rule) {
  schedule::Problem problem = to_pipeline(planning_case, planning_case.attr("cost"), rule);
  problem.replicas = nb::cast<std::int32_t>(planning_case.attr("replicas"));
  problem.workers = static_cast<std::int32_t>(home.size());
  problem.holder = std::move(holder);
  problem.home = std::move(home);
  problem.columns = std::move(columns);
  problem.cost.step = numbers(planning_case, "step");
  problem.cost.reduce = numbers(planning_case, "reduce");
  const auto per_worker = [&](const char* name, double otherwise) {
    std::vector<double> found(problem.home.size(), otherwise);
    for (const nb::handle item : planning_case.attr(name).attr("items")()) {
      const auto worker = nb::cast<std::size_t>(item[0]);
      if (worker < found.size()) found[worker] = nb::cast<double>(item[1]);
    }
    return found;
  };
  problem.slow = per_worker("slow", 1.0);
  problem.port = per_worker("ports", 0.0);
  for (const nb::handle item : planning_case.attr("links").attr("items")()) {
    const nb::handle link = item[1];
    problem.links.push_back({nb::cast<std::int32_t>(item[0][0]), nb::cast<std::int32_t>(item[0][1]),
                             nb::cast<double>(link.attr("latency")), nb::cast<double>(link.attr("occupancy"))});
  }
  problem.hand_over = nb::cast<double>(planning_case.attr("hand_over"));
  problem.hands_over = nb::cast<bool>(planning_case.attr("hands_over"));
  for (const nb::handle stage : planning_case.attr("changing")) problem.changing.at(nb::cast<std::size_t>(stage)) = 1;
  problem.barrier = nb::cast<bool>(planning_case.attr("barrier"));
  if (problem.holder.size() != problem.index(problem.replicas, 0, 0))
    throw std::invalid_argument("holder: expected one worker per microbatch");
  return problem;
}

template <typename Value>
nb::tuple to_tuple(const std::vector<Value>& values) {
  nb::list list;
  for (const Value value : values) list.append(value);
  return nb::tuple(list);
}

template <typename Record>
nb::bytes to_bytes(const std::vector<Record>& records) {
  return nb::bytes(records.data(), records.size() * sizeof(Record));
}

void bind_simulation(nb::module_& m) {
  using schedule::Simulated;
  nb::class_<Simulated>(m, "Simulated")
      .def_ro("complete", &Simulated::complete)
      .def_ro("makespan", &Simulated::makespan)
      .def_ro("period", &Simulated::period)
      .def_prop_ro("busy", [](const Simulated& self) { return to_tuple(self.busy); })
      .def_prop_ro("first_start", [](const Simulated& self) { return to_tuple(self.first_start); })
      .def_prop_ro("last_end", [](const Simulated& self) { return to_tuple(self.last_end); })
      .def(
          "intervals", [](const Simulated& self, std::size_t worker) { return to_bytes(self.ops.at(worker)); },
          nb::arg("worker"))
      .def("messages", [](const Simulated& self) { return to_bytes(self.messages); });

  nb::class_<Orders>(m, "Orders")
      .def("__len__",
           [](const Orders& self) {
             std::size_t ops = 0;
             for (const schedule::Order& order : self.orders) ops += order.size();
             return ops;
           })
      .def(
          "of",
          [](const Orders& self, std::size_t worker, std::optional<std::int32_t> replica) {
            return OpMaker().make(self.orders.at(worker), replica, false);
          },
          nb::arg("worker"), nb::arg("replica") = nb::none())
      .def("computed", [](const Orders& self) {
        OpMaker maker;
        nb::list orders;
        for (const schedule::Order& order : self.orders) orders.append(maker.make(order, {}, true));
        return nb::tuple(orders);
      });
  nb::class_<schedule::Problem>(m, "Problem")
      .def(nb::new_(&to_problem), nb::arg("planning_case"), nb::arg("holder"), nb::arg("home"), nb::arg("columns"),
           nb::arg("rule"))
      .def_static("of_pipeline", &to_pipeline, nb::arg("owner"), nb::arg("cost"), nb::arg("rule"));

  m.def("to_orders", &to_orders, nb::arg("orders"));
  m.def(
      "simulate",
      [](const schedule::Problem& problem, const Orders& converted, std::int32_t steps, bool times) {
        if (steps < 1) throw std::invalid_argument("expected at least one step");
        const nb::gil_scoped_release release;
        const schedule::Contents contents = schedule::contents_of(problem, converted.orders);
        if (contents < (steps == 1 ? schedule::Contents::Partial : schedule::Contents::Forwards)) return Simulated{};
        return schedule::Simulator(problem, steps)
            .run(converted.orders, times ? schedule::Detail::Times : schedule::Detail::Summary);
      },
      nb::arg("problem"), nb::arg("orders"), nb::arg("steps"), nb::arg("times") = true);
  m.def(
      "runs_whole",
      [](const schedule::Problem& problem, const Orders& converted) {
        const nb::gil_scoped_release release;
        return schedule::contents_of(problem, converted.orders) >= schedule::Contents::Forwards &&
               schedule::keep_order(problem, converted.orders) &&
               schedule::Simulator(problem, 1).run(converted.orders).complete;
      },
      nb::arg("problem"), nb::arg("orders"));
  m.def(
      "peaks",
      [](nb::handle cost, const Orders& converted) {
        const schedule::Peaks found = schedule::peaks(to_cost(cost), converted.orders);
        return nb::make_tuple(to_tuple(found.in_flight), to_tuple(found.memory));
      },
      nb::arg("cost"), nb::arg("orders"));
}

const char* name_of(schedule::BoundKind kind) {
  switch (kind) {
    case schedule::BoundKind::Load: return "load";
    case schedule::BoundKind::Drain: return "drain";
    case schedule::BoundKind::Chain: return "chain";
    case schedule::BoundKind::Memory: return "memory";
    case schedule::BoundKind::LinkForward: return "link forward";
    case schedule::BoundKind::LinkBackward: return "link backward";
    case schedule::BoundKind::Idle: return "idle";
    case schedule::BoundKind::OneMachine: return "one machine";
  }
  return "";  // unreachable; GCC does not see that the switch is complete
}

void bind_bounds(nb::module_& m) {
  m.def(
      "lower_bound",
      [](const schedule::Problem& problem) {
        schedule::Bound bound;
        {
          const nb::gil_scoped_release release;
          bound = schedule::lower_bound(problem);
        }
        return nb::make_tuple(bound.value, name_of(bound.kind), bound.where);
      },
      nb::arg("problem"));
}

using Clock = std::chrono::steady_clock;

// Tells a search to end `seconds` after it began.
class Deadline {
 public:
  explicit Deadline(std::optional<double> seconds) {
    if (seconds) at_ = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(*seconds));
  }

  bool operator()() const { return at_ && Clock::now() >= *at_; }

 private:
  std::optional<Clock::time_point> at_;
};

// A plan, or None.
nb::object to_python(std::optional<schedule::Plan> plan) {
  return plan ? nb::object(nb::make_tuple(plan->time, Orders{std::move(plan->orders)})) : nb::none();
}

// Refuses what the searches do not expect, since they look up by these numbers. The verifier says more.
void check(const schedule::Problem& problem, const Orders& orders) {
  if (schedule::contents_of(problem, orders.orders) != schedule::Contents::Whole)
    throw std::invalid_argument("orders: expected all ops of the case, once each, on their workers");
}

void bind_search(nb::module_& m) {
  m.def(
      "search_orders",
      [](const schedule::Problem& problem, const std::vector<std::int32_t>& in_flight,
         const std::vector<std::vector<std::int32_t>>& warm_ups,
         const std::vector<std::pair<std::vector<std::int32_t>, std::vector<std::int32_t>>>& alternations, std::int64_t effort,
         std::uint64_t seed, std::optional<double> seconds, double enough, const Orders* start) {
        const auto one_per_stage = [&](const std::vector<std::int32_t>& counts) {
          if (counts.size() != problem.placement.size()) throw std::invalid_argument("expected one number per stage");
        };
        one_per_stage(in_flight);
        for (const auto& warm_up : warm_ups) one_per_stage(warm_up);
        for (const auto& [warm_up, deferred] : alternations) {
          one_per_stage(warm_up);
          one_per_stage(deferred);
        }
        schedule::SearchOptions options{in_flight, warm_ups, {}, {}, effort, seed, enough, Deadline(seconds)};
        for (const auto& [warm_up, deferred] : alternations) options.alternations.push_back({warm_up, deferred});
        if (start != nullptr) options.start = start->orders;
        std::optional<schedule::Plan> plan;
        {
          const nb::gil_scoped_release release;
          plan = schedule::search_orders(problem, options);
        }
        return to_python(std::move(plan));
      },
      nb::arg("problem"), nb::arg("in_flight"), nb::arg("warm_ups"), nb::arg("alternations"), nb::arg("effort"),
      nb::arg("seed"), nb::arg("seconds").none(), nb::arg("enough") = 0.0, nb::arg("start") = nb::none());
  m.def(
      "spare_memory",
      [](const schedule::Problem& problem, const Orders& orders, double at_most, std::int64_t effort, std::int32_t steps) {
        const nb::gil_scoped_release release;
        return Orders{schedule::spare_memory(problem, orders.orders, at_most, effort, steps)};
      },
      nb::arg("problem"), nb::arg("orders"), nb::arg("at_most"), nb::arg("effort"), nb::arg("steps") = 1);
  m.def(
      "search_period",
      [](const schedule::Problem& problem, const std::optional<std::vector<std::int32_t>>& memory, std::int64_t effort,
         std::uint64_t seed, std::optional<double> seconds, double enough, const Orders* start) {
        if (problem.cost.half_duplex || problem.cost.blocking != schedule::Blocking::None)
          throw std::invalid_argument("expected edges of two directions, and communication that does not block");
        const schedule::Room room = memory ? schedule::room_for(*memory, problem) : schedule::room_of(problem);
        schedule::PeriodSearch search{room, effort, seed, enough, Deadline(seconds), {}};
        if (start != nullptr) {
          const auto computes = [](const schedule::Op& op) { return op.kind <= schedule::Kind::W; };
          const bool is_whole = schedule::contents_of(problem, start->orders) == schedule::Contents::Whole;
          if (!is_whole || !std::all_of(start->orders.begin(), start->orders.end(), [&](const schedule::Order& order) {
                return std::all_of(order.begin(), order.end(), computes);
              }))
            throw std::invalid_argument("start: expected all F, I and W of the case");
          search.start = start->orders;
        }
        std::optional<schedule::Plan> plan;
        {
          const nb::gil_scoped_release release;
          plan = schedule::search_period(problem, search);
        }
        return to_python(std::move(plan));
      },
      nb::arg("problem"), nb::arg("memory").none(), nb::arg("effort"), nb::arg("seed"), nb::arg("seconds").none(),
      nb::arg("enough"), nb::arg("start") = nb::none());
  m.def(
      "insert_foreign",
      [](const schedule::Problem& pipeline, const Orders& orders,
         const std::vector<std::pair<std::int32_t, const Orders*>>& homes,
         const std::vector<std::array<std::int32_t, 4>>& foreign, const std::vector<std::int32_t>& memory,
         double slack) -> nb::object {
        check(pipeline, orders);
        std::vector<schedule::Home> all_homes;
        for (const auto& [replica, of_home] : homes) {
          check(pipeline, *of_home);
          all_homes.push_back({replica, of_home->orders});
        }
        std::vector<schedule::Foreign> guests;
        guests.reserve(foreign.size());
        for (const auto& [home, stage, microbatch, host] : foreign) guests.push_back({home, stage, microbatch, host});
        std::optional<schedule::Insertion> found;
        {
          const nb::gil_scoped_release release;
          found = schedule::insert_foreign(pipeline, orders.orders, all_homes, guests, memory, slack);
        }
        if (!found) return nb::none();
        Orders of_hosts;
        nb::list places;
        for (schedule::HostOrder& host : found->hosts) {
          places.append(nb::make_tuple(host.replica, host.stage));
          of_hosts.orders.push_back(std::move(host.order));
        }
        return nb::make_tuple(found->period, places, std::move(of_hosts));
      },
      nb::arg("pipeline"), nb::arg("orders"), nb::arg("homes"), nb::arg("foreign"), nb::arg("memory"), nb::arg("slack"));
}

void bind_weighted_sum(nb::module_& m) {
  m.def(
      "weighted_sum",
      [](std::uintptr_t numbers, std::size_t count, std::uintptr_t weights, std::size_t block) {
        if (block == 0) throw std::invalid_argument("weights: expected at least one");
        const nb::gil_scoped_release release;
        return adaptra::weighted_sum(reinterpret_cast<const std::int64_t*>(numbers), count,
                                     reinterpret_cast<const std::int64_t*>(weights), block);
      },
      nb::arg("numbers"), nb::arg("count"), nb::arg("weights"), nb::arg("block"));
}

}  // namespace

NB_MODULE(_C, m) {
  m.doc() = "Event simulation and list scheduling of pipeline programs; the engine of the CPU-side data plane; checksums.";
  adaptra::rest_late_threads();
  bind_simulation(m);
  bind_bounds(m);
  bind_search(m);
  bind_delegate(m);
  bind_liveness(m);
  bind_weighted_sum(m);
}
