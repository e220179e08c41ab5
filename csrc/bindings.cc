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
#include "schedule/simulate/orders.h"
#include "schedule/simulate/simulator.h"
#include "schedule/simulate/types.h"

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
  bool find(PyObject* member, schedule::JobKind& kind) const {
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
  using Kind = schedule::JobKind;
  static constexpr std::array<std::pair<const char*, Kind>, schedule::kJobKinds> kNames = {
      {{"F", Kind::F}, {"I", Kind::I}, {"W", Kind::W}, {"B", Kind::B}, {"REDUCE", Kind::Reduce}, {"STEP", Kind::Step}}};
  std::array<nb::object, schedule::kJobKinds> members_;
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

// adaptra.program.Program.orders without communication ops.
std::vector<schedule::JobOrder> to_orders(const nb::tuple& orders) {
  const Kinds kinds;
  const nb::object op_type = nb::module_::import_("adaptra.program").attr("Op");
  const Slot stage(op_type, "stage"), kind_slot(op_type, "kind"), microbatch(op_type, "microbatch"),
      replica(op_type, "replica");
  std::vector<schedule::JobOrder> converted;
  converted.reserve(orders.size());
  for (const nb::handle item : orders) {
    schedule::JobOrder& ops = converted.emplace_back();
    ops.reserve(nb::len(item));
    for (const nb::handle op : item) {
      if (!op.type().is(op_type)) throw std::invalid_argument("orders: expected ops");
      schedule::JobKind kind;
      if (!kinds.find(kind_slot.of(op), kind)) continue;
      ops.push_back({to_index(replica.of(op)), to_index(stage.of(op)), kind, to_index(microbatch.of(op))});
    }
  }
  return converted;
}

// The compute ops of one pipeline alone.
std::vector<schedule::Order> of_pipeline(const std::vector<schedule::JobOrder>& orders) {
  std::vector<schedule::Order> found(orders.size());
  for (std::size_t rank = 0; rank < orders.size(); ++rank) {
    found[rank].reserve(orders[rank].size());
    for (const schedule::JobOp& op : orders[rank]) {
      if (op.kind == schedule::JobKind::Reduce || op.kind == schedule::JobKind::Step) continue;
      found[rank].push_back({op.stage, static_cast<schedule::Kind>(op.kind), op.microbatch});
    }
  }
  return found;
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
  cost.blocking = to_blocking(nb::cast<std::string>(nb::getattr(nb::getattr(model, "blocking"), "value")));
  cost.memory_forward = numbers(model, "memory_forward");
  cost.memory_input_grad = numbers(model, "memory_input_grad");
  const nb::object limit = nb::getattr(model, "memory_limit");
  if (!limit.is_none()) cost.memory_limit = nb::cast<std::vector<double>>(limit);
  cost.update = numbers(model, "update");
  return cost;
}

// `owner` is an adaptra.program.Program or an adaptra.simulation.case.Case: both have a placement and microbatches.
schedule::Problem to_problem(nb::handle owner, nb::handle model, schedule::JobRule rule) {
  schedule::Problem problem;
  problem.rule = std::move(rule);
  problem.cost = to_cost(model);
  problem.microbatches = nb::cast<std::int32_t>(nb::getattr(owner, "microbatches"));
  problem.placement = nb::cast<std::vector<std::int32_t>>(nb::getattr(owner, "placement"));
  if (problem.placement.size() != problem.cost.forward.size()) {
    throw std::invalid_argument("the placement and the cost model have different numbers of stages");
  }
  for (const std::int32_t rank : problem.placement) problem.ranks = std::max(problem.ranks, rank + 1);
  return problem;
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
  std::vector<schedule::JobOrder> orders;
};

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

  nb::class_<Orders>(m, "Orders").def("__len__", [](const Orders& self) {
    std::size_t ops = 0;
    for (const schedule::JobOrder& order : self.orders) ops += order.size();
    return ops;
  });

  m.def("to_orders", [](const nb::tuple& orders) { return Orders{to_orders(orders)}; }, nb::arg("orders"));
  m.def(
      "pipeline_job",
      [](nb::handle program, nb::handle cost, const nb::dict& rule) {
        return schedule::job_of(to_problem(program, cost, to_job_rule(rule)));
      },
      nb::arg("program"), nb::arg("cost"), nb::arg("rule"));
  m.def(
      "simulate",
      [](const schedule::Job& job, const Orders& converted, std::int32_t steps, bool times) {
        if (steps < 1) throw std::invalid_argument("expected at least one step");
        const nb::gil_scoped_release release;
        const schedule::Contents contents = schedule::contents_of(job, converted.orders);
        if (contents < (steps == 1 ? schedule::Contents::Partial : schedule::Contents::Forwards)) return Simulated{};
        return schedule::Simulator(job, steps)
            .run(converted.orders, times ? schedule::Detail::Times : schedule::Detail::Summary);
      },
      nb::arg("job"), nb::arg("orders"), nb::arg("steps"), nb::arg("times") = true);
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
      [](nb::handle planning_case) {
        const schedule::Problem problem = to_problem(planning_case, nb::getattr(planning_case, "cost"), {});
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
        const schedule::Problem problem = to_problem(planning_case, nb::getattr(planning_case, "cost"), to_job_rule(rule));
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
        if (start != nullptr) options.start = of_pipeline(start->orders);
        std::optional<schedule::Plan> plan;
        {
          const nb::gil_scoped_release release;
          plan = schedule::search_orders(problem, options);
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
        const schedule::Problem problem = to_problem(planning_case, nb::getattr(planning_case, "cost"), to_job_rule(rule));
        std::vector<schedule::Order> found;
        {
          const nb::gil_scoped_release release;
          found = schedule::spare_memory(problem, of_pipeline(orders.orders), at_most, effort, steps);
        }
        return to_python(found, problem.microbatches);
      },
      nb::arg("planning_case"), nb::arg("orders"), nb::arg("at_most"), nb::arg("effort"), nb::arg("rule"),
      nb::arg("steps") = 1);
}

void bind_period(nb::module_& m) {
  m.def(
      "search_period_of",
      [](nb::handle planning_case, std::int64_t effort, std::uint64_t seed, std::optional<double> seconds, const nb::dict& rule,
         double enough, const Orders* start) -> nb::object {
        const schedule::Problem problem = to_problem(planning_case, nb::getattr(planning_case, "cost"), to_job_rule(rule));
        if (problem.cost.half_duplex || problem.cost.blocking != schedule::Blocking::None)
          throw std::invalid_argument("expected edges of two directions, and communication that does not block");
        schedule::PipelineSearch search{effort, seed, enough, Deadline(seconds), {}};
        if (start != nullptr) {
          const bool is_split = std::all_of(start->orders.begin(), start->orders.end(), [](const schedule::JobOrder& order) {
            return std::all_of(order.begin(), order.end(),
                               [](const schedule::JobOp& op) { return op.kind <= schedule::JobKind::W; });
          });
          if (!is_split || schedule::contents_of(schedule::job_of(problem), start->orders) != schedule::Contents::Whole)
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
