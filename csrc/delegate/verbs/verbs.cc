#include "delegate/verbs/verbs.h"

#include <stdexcept>
#include <system_error>
#include <variant>

#include "delegate/verbs/ibverbs_dl.h"
#include "delegate/verbs/verbs_wire.h"

namespace adaptra::delegate {

VerbsPorts find_verbs_ports() {
  VerbsPorts found;
  const std::variant<Verbs, Reason> loaded = load_verbs();
  if (const auto* reason = std::get_if<Reason>(&loaded)) {
    found.reason = reason->text;
    return found;
  }
  try {
    for (const Port& port : find_ports(std::get<Verbs>(loaded))) {
      found.ports.push_back({port.device, port.number, port.address, port.interface, port.unusable});
    }
    if (found.ports.empty()) found.reason = "this machine has no RDMA device";
  } catch (const std::system_error& error) {
    found.reason = error.what();
  }
  return found;
}

std::unique_ptr<Wire> make_verbs_wire(const std::string& device, std::uint32_t port, Poller& poller) {
  const std::string name = "RDMA port " + device + "/" + std::to_string(port);
  const std::variant<Verbs, Reason> loaded = load_verbs();
  if (const auto* reason = std::get_if<Reason>(&loaded)) throw std::invalid_argument(name + ": " + reason->text);
  const Verbs& verbs = std::get<Verbs>(loaded);
  for (Port& found : find_ports(verbs)) {
    if (found.device != device || found.number != port) continue;
    if (!found.unusable.empty()) throw std::invalid_argument(name + " " + found.unusable);
    return std::make_unique<VerbsWire>(verbs, std::move(found), poller);
  }
  throw std::invalid_argument(name + ": there is no such port here");
}

}  // namespace adaptra::delegate
