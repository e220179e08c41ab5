// The view of verbs that the rest of the engine has: the ports, or why there are none, and a wire over one of them. libibverbs
// is opened when it is asked for.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "delegate/wire/wire.h"

namespace adaptra::delegate {

struct VerbsPort {
  std::string device;
  std::uint32_t number = 0;
  std::string address;    // numeric; of the network interface that carries a RoCE port
  std::string interface;  // that interface, "" for InfiniBand
  std::string unusable;   // "" if the port can be used now, else why not
};

struct VerbsPorts {
  std::vector<VerbsPort> ports;  // by name
  std::string reason;            // why there are none, "" if there are some
};

// Never throws for what the machine lacks.
[[nodiscard]] VerbsPorts find_verbs_ports();

// Makes a wire over a port. Throws std::invalid_argument if there is no such port here or it can't be used, std::system_error
// if the device refuses.
[[nodiscard]] std::unique_ptr<Wire> make_verbs_wire(const std::string& device, std::uint32_t port, Poller& poller);

}  // namespace adaptra::delegate
