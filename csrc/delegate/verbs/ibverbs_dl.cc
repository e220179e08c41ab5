#include "delegate/verbs/ibverbs_dl.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace adaptra::delegate {
namespace {

constexpr std::size_t kMostGids = 1024;

std::system_error failure(const std::string& what, int error = errno) {
  return std::system_error(error, std::generic_category(), what);
}

template <class Function>
bool find(void* library, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr && missing.empty()) missing = name;
  return function != nullptr;
}

std::string text_of(const in6_addr& address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (IN6_IS_ADDR_V4MAPPED(&address)) {
    ::inet_ntop(AF_INET, &address.s6_addr[12], text.data(), text.size());
  } else {
    ::inet_ntop(AF_INET6, &address, text.data(), text.size());
  }
  return text.data();
}

in6_addr address_of(const ibv_gid& gid) {
  in6_addr address{};
  std::memcpy(&address, gid.raw, sizeof address);
  return address;
}

// The addresses of this network namespace: (interface, address as GIDs write it).
std::vector<std::pair<std::string, in6_addr>> local_addresses() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) throw failure("the addresses of this host");
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> held(first, &::freeifaddrs);
  std::vector<std::pair<std::string, in6_addr>> found;
  for (const ifaddrs* each = first; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr) continue;
    in6_addr address{};
    if (each->ifa_addr->sa_family == AF_INET) {
      address.s6_addr[10] = address.s6_addr[11] = 0xff;
      std::memcpy(&address.s6_addr[12], &reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr, 4);
    } else if (each->ifa_addr->sa_family == AF_INET6) {
      address = reinterpret_cast<const sockaddr_in6*>(each->ifa_addr)->sin6_addr;
    } else {
      continue;
    }
    found.emplace_back(each->ifa_name, address);
  }
  return found;
}

const char* name_of(ibv_port_state state) {
  switch (state) {
    case IBV_PORT_NOP: return "unknown";
    case IBV_PORT_DOWN: return "down";
    case IBV_PORT_INIT: return "init";
    case IBV_PORT_ARMED: return "armed";
    case IBV_PORT_ACTIVE: return "active";
    case IBV_PORT_ACTIVE_DEFER: return "active, deferred";
  }
  return "unknown";
}

int query(const Verbs& verbs, ibv_context& device, std::uint8_t port, ibv_port_attr& attributes) {
  attributes = {};
  return verbs.query_port(&device, port, &attributes);
}

// Finds the GID to connect from; false if there is none.
bool choose_gid(Port& port, const std::vector<ibv_gid_entry>& gids,
                const std::vector<std::pair<std::string, in6_addr>>& local) {
  // Prefers an IPv4 address, then IPv6 addresses, then link-local ones, whose scope a peer on another link does not share.
  const auto rank = [](const in6_addr& address) {
    return IN6_IS_ADDR_V4MAPPED(&address) ? 0 : IN6_IS_ADDR_LINKLOCAL(&address) ? 2 : 1;
  };
  int best = 3;
  for (const ibv_gid_entry& entry : gids) {
    if (entry.port_num != port.number) continue;
    const in6_addr address = address_of(entry.gid);
    std::string interface;
    if (port.is_infiniband) {
      if (entry.gid_type != IBV_GID_TYPE_IB) continue;
    } else {
      if (entry.gid_type != IBV_GID_TYPE_ROCE_V2) continue;
      const auto owner = std::find_if(local.begin(), local.end(), [&](const auto& one) {
        return std::memcmp(&one.second, &address, sizeof address) == 0 &&
               ::if_nametoindex(one.first.c_str()) == entry.ndev_ifindex;
      });
      if (owner == local.end()) continue;
      interface = owner->first;
    }
    if (rank(address) >= best) continue;
    best = rank(address);
    port.gid = entry.gid;
    port.gid_index = entry.gid_index;
    port.interface = std::move(interface);
    port.address = text_of(address);
  }
  return best < 3;
}

Port describe(const Verbs& verbs, ibv_context& device, const std::string& name, std::uint8_t number,
              const std::vector<ibv_gid_entry>& gids, const std::vector<std::pair<std::string, in6_addr>>& local) {
  Port port;
  port.device = name;
  port.number = number;
  ibv_port_attr attributes{};
  if (const int error = query(verbs, device, number, attributes); error != 0) {
    port.unusable = std::string("can't be asked: ") + std::strerror(error);
    return port;
  }
  port.lid = attributes.lid;
  port.mtu = attributes.active_mtu;
  port.is_infiniband = attributes.link_layer != IBV_LINK_LAYER_ETHERNET;
  const bool has_gid = choose_gid(port, gids, local);
  if (!has_gid) {
    port.unusable = port.is_infiniband ? "has no GID" : "has no RoCE v2 GID that is an address of this host";
  } else if (attributes.state != IBV_PORT_ACTIVE) {
    port.unusable = std::string("is ") + name_of(attributes.state);
  }
  return port;
}

}  // namespace

std::variant<Verbs, Reason> load_verbs(const char* file) {
  void* library = ::dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* text = ::dlerror();
    return Reason{std::string("libibverbs: ") + (text != nullptr ? text : "can't be opened") +
                  ": install libibverbs with the provider of your device (Debian: libibverbs1 ibverbs-providers)"};
  }
  Verbs verbs;
  std::string missing;
  find(library, "ibv_get_device_list", verbs.get_device_list, missing);
  find(library, "ibv_free_device_list", verbs.free_device_list, missing);
  find(library, "ibv_get_device_name", verbs.get_device_name, missing);
  find(library, "ibv_open_device", verbs.open_device, missing);
  find(library, "ibv_close_device", verbs.close_device, missing);
  find(library, "ibv_query_device", verbs.query_device, missing);
  find(library, "ibv_query_port", verbs.query_port, missing);
  find(library, "_ibv_query_gid_table", verbs.query_gid_table, missing);
  find(library, "ibv_alloc_pd", verbs.alloc_pd, missing);
  find(library, "ibv_dealloc_pd", verbs.dealloc_pd, missing);
  find(library, "ibv_reg_mr", verbs.reg_mr, missing);
  find(library, "ibv_dereg_mr", verbs.dereg_mr, missing);
  find(library, "ibv_create_comp_channel", verbs.create_comp_channel, missing);
  find(library, "ibv_destroy_comp_channel", verbs.destroy_comp_channel, missing);
  find(library, "ibv_create_cq", verbs.create_cq, missing);
  find(library, "ibv_destroy_cq", verbs.destroy_cq, missing);
  find(library, "ibv_get_cq_event", verbs.get_cq_event, missing);
  find(library, "ibv_ack_cq_events", verbs.ack_cq_events, missing);
  find(library, "ibv_create_qp", verbs.create_qp, missing);
  find(library, "ibv_modify_qp", verbs.modify_qp, missing);
  find(library, "ibv_destroy_qp", verbs.destroy_qp, missing);
  find(library, "ibv_get_async_event", verbs.get_async_event, missing);
  find(library, "ibv_ack_async_event", verbs.ack_async_event, missing);
  find(library, "ibv_wc_status_str", verbs.wc_status_str, missing);
  find(library, "ibv_event_type_str", verbs.event_type_str, missing);
  if (!missing.empty()) {
    ::dlclose(library);
    return Reason{std::string("libibverbs: ") + file + " has no " + missing + ": rdma-core 31 or newer is needed"};
  }
  return verbs;
}

Device open_device(const Verbs& verbs, const std::string& name) {
  int count = 0;
  const std::unique_ptr<ibv_device*, decltype(Verbs::free_device_list)> list(verbs.get_device_list(&count),
                                                                             verbs.free_device_list);
  for (int index = 0; list != nullptr && index < count; ++index) {
    ibv_device* device = list.get()[index];
    if (name != verbs.get_device_name(device)) continue;
    Device opened(verbs.open_device(device), verbs.close_device);
    if (opened == nullptr) throw failure("RDMA device " + name);
    return opened;
  }
  throw failure("RDMA device " + name, ENODEV);
}

std::vector<Port> find_ports(const Verbs& verbs) {
  int count = 0;
  const std::unique_ptr<ibv_device*, decltype(Verbs::free_device_list)> list(verbs.get_device_list(&count),
                                                                             verbs.free_device_list);
  // A kernel without RDMA has no list; that is the same as an empty one.
  if (list == nullptr && errno != ENOSYS) throw failure("the list of RDMA devices");
  const auto local = local_addresses();
  std::vector<Port> ports;
  for (int index = 0; list != nullptr && index < count; ++index) {
    ibv_device* listed = list.get()[index];
    const std::string name = verbs.get_device_name(listed);
    const Device device(verbs.open_device(listed), verbs.close_device);
    ibv_device_attr attributes{};
    if (device == nullptr || verbs.query_device(device.get(), &attributes) != 0) {
      Port& port = ports.emplace_back();
      port.device = name;
      port.number = 1;
      port.unusable = std::string("can't be opened: ") + std::strerror(errno);
      continue;
    }
    std::vector<ibv_gid_entry> gids(kMostGids);
    const auto found = verbs.query_gid_table(device.get(), gids.data(), gids.size(), 0, sizeof(ibv_gid_entry));
    gids.resize(found > 0 ? static_cast<std::size_t>(found) : 0);
    for (std::uint8_t number = 1; number <= attributes.phys_port_cnt; ++number) {
      ports.push_back(describe(verbs, *device, name, number, gids, local));
    }
  }
  std::sort(ports.begin(), ports.end(),
            [](const Port& a, const Port& b) { return std::pair(a.device, a.number) < std::pair(b.device, b.number); });
  return ports;
}

std::string port_state(const Verbs& verbs, ibv_context& device, std::uint8_t port) {
  ibv_port_attr attributes{};
  if (const int error = query(verbs, device, port, attributes); error != 0) {
    return std::string("unknown: ") + std::strerror(error);
  }
  return name_of(attributes.state);
}

}  // namespace adaptra::delegate
