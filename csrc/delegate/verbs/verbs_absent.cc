// Stands in for verbs.cc where libibverbs' header was missing when adaptra was built.
#include <stdexcept>

#include "delegate/verbs/verbs.h"

namespace adaptra::delegate {
namespace {

constexpr const char* kReason = "adaptra was built without libibverbs' header: install libibverbs-dev and build again";

}  // namespace

VerbsPorts find_verbs_ports() { return {{}, kReason}; }

std::unique_ptr<Wire> make_verbs_wire(const std::string& device, std::uint32_t port, Poller&) {
  throw std::invalid_argument("RDMA port " + device + "/" + std::to_string(port) + ": " + kReason);
}

}  // namespace adaptra::delegate
