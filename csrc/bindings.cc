// The extension adaptra._C. Only the files bindings*.cc know nanobind. Each concern has one bind_… function. How
// Python's Program, CostModel and RULE become plain numbers is written once, at the top.
#include <nanobind/nanobind.h>
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
#include "bindings_replicas.h"
#include "schedule/bounds/bounds.h"
#include "schedule/replicas/one_pipeline.h"
#include "schedule/search/search_orders.h"
#include "schedule/search/spare_memory.h"
#include "schedule/simulate/repeated.h"
#include "schedule/simulate/simulate.h"
#include "schedule/simulate/types.h"

namespace nb = nanobind;
namespace schedule = adaptra::schedule;

namespace {

// The members of adaptra.program.Kind that compute, looked up once per call: an enum member is one object, so comparing
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
  static constexpr std::array<std::pair<const char*, schedule::Kind>, 4> kNames = {
      {{"F", schedule::Kind::F}, {"I", schedule::Kind::I}, {"W", schedule::Kind::W}, {"B", schedule::Kind::B}}};
  std::array<nb::object, 4> members_;
};

nb::object attribute(nb::handle object, nb::handle name) {
  PyObject* value = PyObject_GetAttr(object.ptr(), name.ptr());
  if (value == nullptr) throw nb::python_error();
  return nb::steal(value);
}

std::int32_t to_index(nb::handle value) {
  const long index = PyLong_AsLong(value.ptr());
  if (index == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
  if (index < 0 || index > INT32_MAX) throw std::invalid_argument("a stage or microbatch number is negative or too large");
  return static_cast<std::int32_t>(index);
}

// adaptra.program.Program.orders without communication ops.
std::vector<schedule::Order> to_orders(const nb::tuple& orders) {
  const Kinds kinds;
  const nb::str stage("stage"), kind_name("kind"), microbatch("microbatch");
  std::vector<schedule::Order> converted;
  converted.reserve(orders.size());
  for (const nb::handle item : orders) {
    schedule::Order& ops = converted.emplace_back();
    ops.reserve(nb::len(item));
    for (const nb::handle op : item) {
      schedule::Kind kind;
      if (!kinds.find(attribute(op, kind_name).ptr(), kind)) continue;
      ops.push_back({to_index(attribute(op, stage)), kind, to_index(attribute(op, microbatch))});
    }
  }
  return converted;
}

std::vector<double> numbers(nb::handle object, const char* name) {
  return nb::cast<std::vector<double>>(nb::getattr(object, name));
}

// adaptra.simulation.cost.CostModel.
schedule::Cost to_cost(nb::handle model) {
  schedule::Cost cost;
  cost.forward = numbers(model, "forward");
  cost.input_grad = numbers(model, "input_grad");
  cost.weight_grad = numbers(model, "weight_grad");
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

// `owner` is an adaptra.program.Program or an adaptra.simulation.case.Case: both have a placement and microbatches.
schedule::Problem to_problem(nb::handle owner, nb::handle model) {
  schedule::Problem problem;
  problem.cost = to_cost(model);
  problem.microbatches = nb::cast<std::int32_t>(nb::getattr(owner, "microbatches"));
  problem.placement = nb::cast<std::vector<std::int32_t>>(nb::getattr(owner, "placement"));
  if (problem.placement.size() != problem.cost.forward.size()) {
    throw std::invalid_argument("the placement and the cost model have different numbers of stages");
  }
  for (const std::int32_t rank : problem.placement) problem.ranks = std::max(problem.ranks, rank + 1);
  return problem;
}

// adaptra.program.dependencies.RULE, without the rows of communication ops and those that count between two workers of a stage,
// as one pipeline has none.
schedule::Rule to_rule(const nb::dict& table) {
  const Kinds kinds;
  schedule::Rule rule;
  for (const auto& [member, rows] : table) {
    schedule::Kind kind;
    if (!kinds.find(member.ptr(), kind)) continue;
    for (const nb::handle row : rows) {
      if (nb::cast<std::int32_t>(nb::getattr(row, "later")) != 0) continue;
      std::uint8_t mask = 0;
      for (const nb::handle met_by : nb::getattr(row, "kinds")) {
        schedule::Kind producer;
        if (kinds.find(met_by.ptr(), producer)) mask = static_cast<std::uint8_t>(mask | schedule::bit_of(producer));
      }
      rule.push_back({kind, nb::cast<std::int32_t>(nb::getattr(row, "offset")), mask});
    }
  }
  return rule;
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

  // Sets the attribute of an instance whose slot is empty.
  void fill(nb::handle object, nb::handle value) const {
    *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object.ptr()) + offset_) = value.inc_ref().ptr();
  }

 private:
  Py_ssize_t offset_;
};

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

// Makes adaptra.program.Program.orders: makes each Op and fills its slots directly. Its constructor has nothing to check, yet
// takes ten times as long, a tenth of a second for 100,000 ops. An Op refers to nothing that refers to it, so Python need not
// look for garbage among them.
nb::tuple to_python(const std::vector<schedule::Order>& orders, std::int32_t microbatches) {
  const WithoutCollecting guard;
  const Kinds kinds;
  const nb::object op_type = nb::module_::import_("adaptra.program").attr("Op");
  auto* const type = reinterpret_cast<PyTypeObject*>(op_type.ptr());
  const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  const Slot stage(op_type, "stage"), kind(op_type, "kind"), number(op_type, "microbatch"), lane(op_type, "lane");
  const Slot replica(op_type, "replica");
  const nb::int_ first(0);  // one pipeline is a job of one replica
  std::vector<nb::int_> numbers;
  for (std::int32_t microbatch = 0; microbatch < microbatches; ++microbatch) numbers.emplace_back(microbatch);
  const auto converted = nb::steal<nb::tuple>(PyTuple_New(static_cast<Py_ssize_t>(orders.size())));
  if (!converted.is_valid()) throw nb::python_error();
  for (std::size_t rank = 0; rank < orders.size(); ++rank) {
    const schedule::Order& order = orders[rank];
    PyObject* const ops = PyTuple_New(static_cast<Py_ssize_t>(order.size()));
    if (ops == nullptr) throw nb::python_error();
    PyTuple_SET_ITEM(converted.ptr(), static_cast<Py_ssize_t>(rank), ops);
    nb::int_ at(0);
    std::int32_t at_stage = 0;
    for (std::size_t index = 0; index < order.size(); ++index) {
      const schedule::Op& op = order[index];
      if (op.stage != at_stage) at = nb::int_(at_stage = op.stage);
      PyObject* const made = allocate(type, 0);
      if (made == nullptr) throw nb::python_error();
      PyTuple_SET_ITEM(ops, static_cast<Py_ssize_t>(index), made);
      PyObject_GC_UnTrack(made);
      stage.fill(made, at);
      kind.fill(made, kinds.member(op.kind));
      number.fill(made, numbers[static_cast<std::size_t>(op.microbatch)]);
      lane.fill(made, nb::none());
      replica.fill(made, first);
    }
  }
  return converted;
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

// Orders converted from Python, so that converting and simulating are two calls, timed apart.
struct Orders {
  std::vector<schedule::Order> orders;
};

// The result of a simulation, and the peaks, which its orders alone decide.
struct Simulated {
  schedule::Result result;
  schedule::Peaks peaks;
};

void bind_simulation(nb::module_& m) {
  nb::class_<Simulated>(m, "Simulated")
      .def_prop_ro("complete", [](const Simulated& self) { return self.result.complete; })
      .def_prop_ro("makespan", [](const Simulated& self) { return self.result.makespan; })
      .def_prop_ro("busy", [](const Simulated& self) { return to_tuple(self.result.busy); })
      .def_prop_ro("first_start", [](const Simulated& self) { return to_tuple(self.result.first_start); })
      .def_prop_ro("last_end", [](const Simulated& self) { return to_tuple(self.result.last_end); })
      .def_prop_ro("peak_in_flight", [](const Simulated& self) { return to_tuple(self.peaks.in_flight); })
      .def_prop_ro("peak_memory", [](const Simulated& self) { return to_tuple(self.peaks.memory); })
      .def(
          "intervals", [](const Simulated& self, std::size_t rank) { return to_bytes(self.result.ops.at(rank)); },
          nb::arg("rank"))
      .def("messages", [](const Simulated& self) { return to_bytes(self.result.messages); });

  nb::class_<Orders>(m, "Orders").def("__len__", [](const Orders& self) {
    std::size_t ops = 0;
    for (const schedule::Order& order : self.orders) ops += order.size();
    return ops;
  });

  m.def("to_orders", [](const nb::tuple& orders) { return Orders{to_orders(orders)}; }, nb::arg("orders"));
  m.def(
      "simulate",
      [](nb::handle program, nb::handle cost, const Orders& converted, const nb::dict& rule) {
        const std::vector<schedule::Order>& orders = converted.orders;
        const schedule::Problem problem = to_problem(program, cost);
        const schedule::Rule rows = to_rule(rule);
        const nb::gil_scoped_release release;
        if (!schedule::well_formed(problem, orders)) return Simulated{};
        return Simulated{schedule::simulate(problem, orders, rows, schedule::Detail::Times), schedule::peaks(problem, orders)};
      },
      nb::arg("program"), nb::arg("cost"), nb::arg("orders"), nb::arg("rule"));
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
      [](nb::handle planning_case) {
        const schedule::Problem problem = to_problem(planning_case, nb::getattr(planning_case, "cost"));
        schedule::Bound bound;
        {
          const nb::gil_scoped_release release;
          bound = schedule::lower_bound(problem);
        }
        return nb::make_tuple(bound.value, name_of(bound.kind), bound.where);
      },
      nb::arg("planning_case"));
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

void bind_search(nb::module_& m) {
  m.def(
      "search_orders",
      [](nb::handle planning_case, const std::vector<std::int32_t>& in_flight,
         const std::vector<std::vector<std::int32_t>>& warm_ups,
         const std::vector<std::pair<std::vector<std::int32_t>, std::vector<std::int32_t>>>& alternations, std::int64_t effort,
         std::uint64_t seed, std::optional<double> seconds, const nb::dict& rule, double enough,
         const Orders* start) -> nb::object {
        const schedule::Problem problem = to_problem(planning_case, nb::getattr(planning_case, "cost"));
        const schedule::Rule rows = to_rule(rule);
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
          plan = schedule::search_orders(problem, rows, options);
        }
        if (!plan) return nb::none();
        return nb::make_tuple(plan->makespan, to_python(plan->orders, problem.microbatches));
      },
      nb::arg("planning_case"), nb::arg("in_flight"), nb::arg("warm_ups"), nb::arg("alternations"), nb::arg("effort"),
      nb::arg("seed"), nb::arg("seconds").none(), nb::arg("rule"), nb::arg("enough") = 0.0, nb::arg("start") = nb::none());
  m.def(
      "spare_memory",
      [](nb::handle planning_case, const Orders& orders, double at_most, std::int64_t effort, const nb::dict& rule,
         std::int32_t steps) {
        const schedule::Problem problem = to_problem(planning_case, nb::getattr(planning_case, "cost"));
        const schedule::Rule rows = to_rule(rule);
        std::vector<schedule::Order> found;
        {
          const nb::gil_scoped_release release;
          found = schedule::spare_memory(problem, rows, orders.orders, at_most, effort, steps);
        }
        return to_python(found, problem.microbatches);
      },
      nb::arg("planning_case"), nb::arg("orders"), nb::arg("at_most"), nb::arg("effort"), nb::arg("rule"),
      nb::arg("steps") = 1);
}

void bind_period(nb::module_& m) {
  m.def(
      "period_of",
      [](nb::handle program, nb::handle cost, const Orders& converted, const nb::dict& rule,
         std::int32_t steps) -> std::optional<double> {
        if (steps < 2) throw std::invalid_argument("expected at least two steps");
        const schedule::Problem problem = to_problem(program, cost);
        const schedule::Rule rows = to_rule(rule);
        const nb::gil_scoped_release release;
        if (!schedule::well_formed(problem, converted.orders)) return std::nullopt;
        return schedule::period_of(problem, converted.orders, rows, steps);
      },
      nb::arg("program"), nb::arg("cost"), nb::arg("orders"), nb::arg("rule"), nb::arg("steps"));
  m.def(
      "search_period_of",
      [](nb::handle planning_case, std::int64_t effort, std::uint64_t seed, std::optional<double> seconds, const nb::dict& rule,
         double enough, const Orders* start) -> nb::object {
        const schedule::Problem problem = to_problem(planning_case, nb::getattr(planning_case, "cost"));
        if (problem.cost.half_duplex || problem.cost.blocking != schedule::Blocking::None)
          throw std::invalid_argument("expected edges of two directions, and communication that does not block");
        schedule::PipelineSearch search{to_job_rule(rule), effort, seed, enough, Deadline(seconds), {}};
        if (start != nullptr) {
          std::size_t ops = 0;
          bool is_split = true;
          for (const schedule::Order& order : start->orders) {
            ops += order.size();
            is_split = is_split && std::none_of(order.begin(), order.end(),
                                                [](const schedule::Op& op) { return op.kind == schedule::Kind::B; });
          }
          const std::size_t all = 3 * problem.placement.size() * static_cast<std::size_t>(problem.microbatches);
          if (!schedule::well_formed(problem, start->orders) || !is_split || ops != all)
            throw std::invalid_argument("start: expected all F, I and W of the case");
          search.start = start->orders;
        }
        std::optional<schedule::PipelinePlan> plan;
        {
          const nb::gil_scoped_release release;
          plan = schedule::search_period_of(problem, search);
        }
        if (!plan) return nb::none();
        return nb::make_tuple(plan->period, to_python(plan->orders, problem.microbatches));
      },
      nb::arg("planning_case"), nb::arg("effort"), nb::arg("seed"), nb::arg("seconds").none(), nb::arg("rule"),
      nb::arg("enough"), nb::arg("start") = nb::none());
}

}  // namespace

NB_MODULE(_C, m) {
  m.doc() = "Event simulation and list scheduling of pipeline programs; the engine of the CPU-side data plane.";
  bind_simulation(m);
  bind_bounds(m);
  bind_search(m);
  bind_period(m);
  bind_delegate(m);
  bind_liveness(m);
  bind_replicas(m);
}
