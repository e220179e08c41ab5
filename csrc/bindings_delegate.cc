// The delegate's part of adaptra._C. Python gets memory as an address and a size; adaptra.runtime.transports.delegate makes
// tensors of it.
#include "bindings_delegate.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "delegate/engine.h"
#include "delegate/security/hmac.h"
#include "delegate/system/crc32c.h"
#include "delegate/verbs/verbs.h"

namespace nb = nanobind;
using namespace adaptra::delegate;

namespace {

// Python's pages of memory: nanobind can't hold a pointer to const.
struct Held {
  std::shared_ptr<const Pages> pages;
};

// A request with the channel it belongs to.
struct Ticket {
  std::shared_ptr<Request> request;
  std::uint32_t peer = 0;
  ChannelClass channel = ChannelClass::kForward;
};

// Limits the seconds to what the clock can represent.
Clock::duration to_duration(double seconds) {
  constexpr double kMost = 1e9;
  if (std::isnan(seconds)) throw std::invalid_argument("got nan: expected a number of seconds");
  seconds = std::clamp(seconds, -kMost, kMost);
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

double to_seconds(Clock::time_point moment) { return std::chrono::duration<double>(moment.time_since_epoch()).count(); }

ChannelClass to_class(std::uint32_t number) {
  if (number >= kChannelClasses.size()) {
    throw std::invalid_argument("channel class " + std::to_string(number) + ": expected 0.." +
                                std::to_string(kChannelClasses.size() - 1));
  }
  return static_cast<ChannelClass>(number);
}

Clock::time_point to_moment(double seconds) { return Clock::time_point(to_duration(seconds)); }

std::span<const std::byte> to_span(const nb::bytes& given) {
  return {reinterpret_cast<const std::byte*>(given.c_str()), given.size()};
}

Secret to_secret(const nb::bytes& given) {
  Secret secret{};
  if (given.size() != secret.size()) {
    throw std::invalid_argument("a secret of " + std::to_string(given.size()) + " bytes: expected " +
                                std::to_string(secret.size()));
  }
  std::memcpy(secret.data(), given.c_str(), secret.size());
  return secret;
}

// Waits without the interpreter's lock, and wakes now and then so that an interrupt from the keyboard gets through.
bool wait(const Ticket& ticket, std::optional<double> timeout) {
  constexpr std::chrono::duration<double> kSlice{0.1};
  const auto deadline = timeout ? Clock::now() + to_duration(*timeout) : Clock::time_point::max();
  while (true) {
    const auto slice = std::min(kSlice, std::chrono::duration<double>(deadline - Clock::now()));
    Outcome outcome{};
    {
      const nb::gil_scoped_release release;
      outcome = ticket.request->wait(slice);
    }
    if (outcome != Outcome::kPending) return true;
    if (Clock::now() >= deadline) return false;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

nb::dict to_dict(const Stats& stats) {
  const auto read = [](const std::atomic<std::uint64_t>& counter) { return counter.load(std::memory_order_relaxed); };
  nb::dict counters;
  counters["posted"] = read(stats.posted);
  counters["sent"] = read(stats.sent);
  counters["acknowledged"] = read(stats.acknowledged);
  counters["bytes"] = read(stats.bytes);
  counters["queued_ns"] = read(stats.queued_ns);
  counters["flight_ns"] = read(stats.flight_ns);
  counters["in_flight"] = read(stats.in_flight);
  counters["most_in_flight"] = read(stats.most_in_flight);
  counters["retries"] = read(stats.retries);
  counters["duplicates"] = read(stats.duplicates);
  counters["dropped"] = read(stats.dropped);
  counters["corrupted"] = read(stats.corrupted);
  counters["path_failures"] = read(stats.path_failures);
  counters["path_changes"] = read(stats.path_changes);
  counters["longest_outage_ns"] = read(stats.longest_outage_ns);
  counters["connections"] = read(stats.connections);
  return counters;
}

void bind_memory(nb::module_& m) {
  nb::class_<Held>(m, "Memory")
      .def_prop_ro("address",
                   [](const Held& held) { return reinterpret_cast<std::uintptr_t>(held.pages->memory().bytes.data()); })
      .def("__len__", [](const Held& held) { return held.pages->memory().bytes.size(); });

  nb::class_<Ticket>(m, "Request")
      .def_prop_ro("done", [](const Ticket& ticket) { return ticket.request->outcome() != Outcome::kPending; })
      .def("wait", &wait, nb::arg("timeout").none())
      .def(
          "cancel", [](const Ticket& ticket, std::string why) { ticket.request->fail(std::move(why)); }, nb::arg("why"))
      .def_prop_ro("error",
                   [](const Ticket& ticket) -> std::optional<std::string> {
                     if (ticket.request->outcome() != Outcome::kFailed) return std::nullopt;
                     return ticket.request->text();
                   })
      .def_prop_ro("other",
                   [](const Ticket& ticket) -> std::optional<nb::bytes> {
                     if (ticket.request->outcome() != Outcome::kOther) return std::nullopt;
                     const std::string& head = ticket.request->text();
                     return nb::bytes(head.data(), head.size());
                   })
      .def_prop_ro("memory",
                   [](const Ticket& ticket) -> std::optional<Held> {
                     if (ticket.request->outcome() != Outcome::kDone || !ticket.request->pages()) return std::nullopt;
                     return Held{ticket.request->pages()};
                   })
      .def_prop_ro("moment", [](const Ticket& ticket) { return to_seconds(ticket.request->moment()); });
}

void bind_engine(nb::module_& m) {
  nb::class_<Engine>(m, "Engine")
      .def(nb::new_([](std::uint32_t rank, std::uint32_t world_size, const nb::bytes& secret, double heartbeat, double silence,
                       double healthy_for, double lost_after, double handshake, const nb::bytes& session) {
             Timing timing;
             timing.heartbeat = to_duration(heartbeat);
             timing.silence = to_duration(silence);
             timing.healthy_for = to_duration(healthy_for);
             timing.lost_after = to_duration(lost_after);
             timing.handshake = to_duration(handshake);
             const Credentials own{to_secret(secret), sha256(to_span(session)), rank};
             return std::shared_ptr<Engine>(new Engine(world_size, own, timing), [](Engine* engine) {
               if (!engine->is_copy()) delete engine;
             });
           }),
           nb::arg("rank"), nb::arg("world_size"), nb::arg("secret"), nb::kw_only(), nb::arg("heartbeat"), nb::arg("silence"),
           nb::arg("healthy_for"), nb::arg("lost_after"), nb::arg("handshake"), nb::arg("session") = nb::bytes("", 0))
      .def("add_tcp_path", &Engine::add_tcp_path, nb::arg("local"))
      .def(
          "add_verbs_path",
          [](Engine& engine, const std::string& device, std::uint32_t port, const std::string& local) {
            return engine.add_path(make_verbs_wire(device, port, engine.poller()), local);
          },
          nb::arg("device"), nb::arg("port"), nb::arg("local"))
      .def(
          "set_peer",
          [](Engine& engine, std::uint32_t peer, const std::vector<std::pair<std::string, std::uint16_t>>& endpoints) {
            std::vector<Endpoint> converted;
            for (const auto& [host, port] : endpoints) converted.push_back({host, port});
            engine.set_peer(peer, std::move(converted));
          },
          nb::arg("peer"), nb::arg("endpoints"))
      .def("start", &Engine::start)
      .def(
          "allocate", [](Engine& engine, std::size_t size) { return Held{engine.allocate(size)}; }, nb::arg("size"))
      .def(
          "stock", [](Engine& engine, const Held& memory) { engine.stock(memory.pages); }, nb::arg("memory"))
      .def("reserve", &Engine::reserve, nb::arg("peer"), nb::arg("size"), nb::arg("count"),
           nb::call_guard<nb::gil_scoped_release>())
      .def(
          "send",
          [](Engine& engine, std::uint32_t peer, std::uint32_t number, const Held& message, std::size_t size,
             double posted_at) {
            const ChannelClass channel = to_class(number);
            return Ticket{engine.send(peer, channel, message.pages, size, to_moment(posted_at)), peer, channel};
          },
          nb::arg("peer"), nb::arg("channel"), nb::arg("message"), nb::arg("size"), nb::arg("posted_at"),
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "receive",
          [](Engine& engine, std::uint32_t peer, std::uint32_t number, std::uint64_t size) {
            const ChannelClass channel = to_class(number);
            return Ticket{engine.receive(peer, channel, size), peer, channel};
          },
          nb::arg("peer"), nb::arg("channel"), nb::arg("size"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "release",
          [](Engine& engine, const Ticket& ticket) {
            if (ticket.request->outcome() == Outcome::kDone && ticket.request->pages()) {
              engine.release(ticket.peer, ticket.channel, ticket.request->slot());
            }
          },
          nb::arg("request"), nb::call_guard<nb::gil_scoped_release>())
      .def("begin", &Engine::begin, nb::arg("attempt"), nb::call_guard<nb::gil_scoped_release>())
      .def("statistics",
           [](const Engine& engine) {
             nb::list found;
             for (const ChannelReport& report : engine.channels()) {
               const Address& address = report.address;
               found.append(nb::make_tuple(address.source, address.destination, static_cast<std::uint32_t>(address.channel),
                                           report.is_sender, to_dict(*report.stats)));
             }
             return found;
           })
      .def("refusals",
           [](const Engine& engine) {
             nb::list found;
             for (const Refusal& refusal : engine.refusals()) {
               found.append(nb::make_tuple(refusal.from, refusal.reason, refusal.count));
             }
             return found;
           })
      .def(
          "close", [](Engine& engine, const std::string& reason, double linger) { engine.close(reason, to_duration(linger)); },
          nb::arg("reason"), nb::arg("linger"), nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

void bind_delegate(nb::module_& m) {
  bind_memory(m);
  bind_engine(m);
  m.def(
      "crc32c", [](const nb::bytes& data, std::uint32_t before) { return crc32c(to_span(data), before); }, nb::arg("data"),
      nb::arg("before") = 0);
  m.def("find_verbs_ports", [] {
    const VerbsPorts found = find_verbs_ports();
    nb::list ports;
    for (const VerbsPort& port : found.ports) {
      ports.append(nb::make_tuple(port.device, port.number, port.address, port.interface, port.unusable));
    }
    return nb::make_tuple(ports, found.reason);
  });
}
