// The search for orders of several replicas in the extension adaptra._C.
#include "bindings_replicas.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "schedule/replicas/insert_foreign.h"
#include "schedule/replicas/network.h"
#include "schedule/replicas/search_period.h"
#include "schedule/simulate/job.h"
#include "schedule/simulate/orders.h"

namespace nb = nanobind;
namespace schedule = adaptra::schedule;

namespace {

using Durations = std::vector<std::vector<double>>;
using Links = std::vector<std::tuple<std::int32_t, std::int32_t, double, double>>;

schedule::Job to_job(std::int32_t replicas, std::int32_t microbatches, Durations durations, std::vector<double> slow,
                     std::vector<double> port, Durations latency, Durations occupancy, const Links& links, double hand_over,
                     bool hands_over, bool half_duplex, const std::string& blocking, std::vector<std::uint8_t> changing,
                     bool barrier, std::vector<std::int32_t> holder, std::vector<std::int32_t> home,
                     std::vector<std::vector<std::int32_t>> columns, const nb::dict& rule) {
  schedule::Job job;
  if (durations.size() != 5) throw std::invalid_argument("durations: expected those of F, I, W, STEP and REDUCE");
  job.rule = to_job_rule(rule);
  job.replicas = replicas;
  job.stages = static_cast<std::int32_t>(durations[0].size());
  job.microbatches = microbatches;
  job.workers = static_cast<std::int32_t>(slow.size());
  job.forward = std::move(durations[0]);
  job.input_grad = std::move(durations[1]);
  job.weight_grad = std::move(durations[2]);
  job.step = std::move(durations[3]);
  job.reduce = std::move(durations[4]);
  job.slow = std::move(slow);
  job.port = std::move(port);
  if (latency.size() != 2 || occupancy.size() != 2) throw std::invalid_argument("latency, occupancy: expected two directions");
  job.latency_forward = std::move(latency[0]);
  job.latency_backward = std::move(latency[1]);
  job.occupancy_forward = std::move(occupancy[0]);
  job.occupancy_backward = std::move(occupancy[1]);
  for (const auto& [source, destination, delay, keeps] : links) job.links.push_back({source, destination, delay, keeps});
  job.hand_over = hand_over;
  job.hands_over = hands_over;
  job.half_duplex = half_duplex;
  job.blocking = to_blocking(blocking);
  job.changing = std::move(changing);
  job.barrier = barrier;
  job.holder = std::move(holder);
  job.home = std::move(home);
  job.columns = std::move(columns);
  if (job.changing.size() != job.forward.size()) throw std::invalid_argument("changing: expected one value per stage");
  if (job.holder.size() != job.index(replicas, 0, 0)) throw std::invalid_argument("holder: expected one worker per microbatch");
  return job;
}

std::vector<schedule::JobOrder> to_orders(const std::vector<nb::bytes>& packed) {
  std::vector<schedule::JobOrder> orders;
  orders.reserve(packed.size());
  for (const nb::bytes& bytes : packed) {
    std::vector<std::int32_t> numbers(bytes.size() / sizeof(std::int32_t));
    std::memcpy(numbers.data(), bytes.c_str(), numbers.size() * sizeof(std::int32_t));
    schedule::JobOrder& order = orders.emplace_back();
    order.reserve(numbers.size() / 4);
    for (std::size_t at = 0; at + 3 < numbers.size(); at += 4) {
      order.push_back({numbers[at], numbers[at + 1], static_cast<schedule::JobKind>(numbers[at + 2]), numbers[at + 3]});
    }
  }
  return orders;
}

nb::bytes to_packed(const schedule::JobOrder& order) {
  std::vector<std::int32_t> numbers;
  numbers.reserve(4 * order.size());
  for (const schedule::JobOp& op : order) {
    numbers.insert(numbers.end(), {op.replica, op.stage, static_cast<std::int32_t>(op.kind), op.microbatch});
  }
  return nb::bytes(numbers.data(), numbers.size() * sizeof(std::int32_t));
}

// Refuses what the searches do not expect, since they look up by these numbers. The verifier says more.
void check(const schedule::Job& job, const std::vector<schedule::JobOrder>& orders) {
  if (schedule::contents_of(job, orders) != schedule::Contents::Whole)
    throw std::invalid_argument("orders: expected all ops of the job, once each, on their workers");
}

}  // namespace

schedule::Blocking to_blocking(const std::string& value) {
  return value == "none" ? schedule::Blocking::None : value == "send" ? schedule::Blocking::Send : schedule::Blocking::Both;
}

schedule::JobRule to_job_rule(const nb::dict& table) {
  const auto members = [](nb::handle owner, std::initializer_list<const char*> names) {
    std::vector<nb::object> found;
    for (const char* name : names) found.push_back(owner.attr(name));
    return found;
  };
  const auto place = [](const std::vector<nb::object>& all, nb::handle one) {
    const auto found = std::find_if(all.begin(), all.end(), [one](const nb::object& other) { return other.is(one); });
    if (found == all.end()) throw std::invalid_argument("rule: expected rows of compute ops, met by compute ops");
    return found - all.begin();
  };
  const std::vector<nb::object> kinds = members(nb::module_::import_("adaptra.program").attr("Kind"), {"F", "I", "W", "B"});
  const nb::object when = nb::module_::import_("adaptra.program.dependencies").attr("When");
  const std::vector<nb::object> whens = members(when, {"ALWAYS", "HANDED_OVER", "CHANGING"});
  schedule::JobRule rule;
  for (std::size_t kind = 0; kind < rule.size(); ++kind) {
    for (const nb::handle given : nb::cast<nb::tuple>(table[kinds[kind]])) {
      const auto fields = nb::cast<nb::tuple>(given);  // a named tuple: offset, kinds, later, when
      schedule::JobRow row{nb::cast<std::int32_t>(fields[0]),
                           {},
                           nb::cast<std::int32_t>(fields[2]),
                           static_cast<schedule::When>(place(whens, fields[3]))};
      for (const nb::handle met_by : nb::cast<nb::tuple>(fields[1])) {
        row.kinds.push_back(static_cast<schedule::JobKind>(place(kinds, met_by)));
      }
      rule[kind].push_back(std::move(row));
    }
    if (rule[kind].size() > schedule::kMostNeeds) throw std::invalid_argument("rule: too many rows of a kind");
  }
  return rule;
}

void bind_replicas(nb::module_& m) {
  nb::class_<schedule::Job>(m, "Job").def(nb::new_(&to_job), nb::kw_only(), nb::arg("replicas"), nb::arg("microbatches"),
                                          nb::arg("durations"), nb::arg("slow"), nb::arg("port"), nb::arg("latency"),
                                          nb::arg("occupancy"), nb::arg("links"), nb::arg("hand_over"), nb::arg("hands_over"),
                                          nb::arg("half_duplex"), nb::arg("blocking"), nb::arg("changing"), nb::arg("barrier"),
                                          nb::arg("holder"), nb::arg("home"), nb::arg("columns"), nb::arg("rule"));

  m.def(
      "search_period",
      [](const schedule::Job& job, const std::vector<std::int32_t>& memory, std::int64_t effort, std::uint64_t seed,
         std::optional<double> seconds, double enough) -> nb::object {
        using Clock = std::chrono::steady_clock;
        schedule::PeriodSearch search{schedule::room_for(memory, job.forward.size()), effort, seed, enough, {}};
        if (seconds) {
          const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(*seconds));
          search.stop = [end] { return Clock::now() >= end; };
        }
        std::optional<schedule::JobPlan> plan;
        {
          const nb::gil_scoped_release without_gil;
          plan = schedule::search_period(job, search);
        }
        if (!plan) return nb::none();
        nb::list orders;
        for (const schedule::JobOrder& order : plan->orders) orders.append(to_packed(order));
        return nb::make_tuple(plan->period, orders);
      },
      nb::arg("job"), nb::arg("memory"), nb::arg("effort"), nb::arg("seed"), nb::arg("seconds").none(), nb::arg("enough"));

  m.def(
      "insert_foreign",
      [](const schedule::Job& pipeline, const std::vector<nb::bytes>& packed,
         const std::vector<std::pair<std::int32_t, std::vector<nb::bytes>>>& packed_homes,
         const std::vector<std::array<std::int32_t, 4>>& foreign, const std::vector<std::int32_t>& memory,
         double slack) -> nb::object {
        const std::vector<schedule::JobOrder> orders = to_orders(packed);
        check(pipeline, orders);
        std::vector<schedule::Home> homes;
        for (const auto& [replica, packed_orders] : packed_homes) {
          homes.push_back({replica, to_orders(packed_orders)});
          check(pipeline, homes.back().orders);
        }
        std::vector<schedule::Foreign> given;
        given.reserve(foreign.size());
        for (const auto& [home, stage, microbatch, host] : foreign) given.push_back({home, stage, microbatch, host});
        std::optional<schedule::Insertion> found;
        {
          const nb::gil_scoped_release without_gil;
          found = schedule::insert_foreign(pipeline, orders, homes, given, memory, slack);
        }
        if (!found) return nb::none();
        nb::list hosts;
        for (const schedule::HostOrder& host : found->hosts)
          hosts.append(nb::make_tuple(host.replica, host.stage, to_packed(host.order)));
        return nb::make_tuple(found->period, hosts);
      },
      nb::arg("pipeline"), nb::arg("orders"), nb::arg("homes"), nb::arg("foreign"), nb::arg("memory"), nb::arg("slack"));
}
