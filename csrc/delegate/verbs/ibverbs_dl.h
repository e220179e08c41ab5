// libibverbs by dlopen: a machine without RDMA needs neither the library nor a rebuild, and learns why verbs are not there.
#pragma once

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

namespace adaptra::delegate {

// The functions of libibverbs that are real symbols. Posting, polling and arming go through the device's own table
// (ibv_post_send, ibv_post_recv, ibv_poll_cq and ibv_req_notify_cq are inline in the header) and need no entry here.
struct Verbs {
  decltype(&::ibv_get_device_list) get_device_list = nullptr;
  decltype(&::ibv_free_device_list) free_device_list = nullptr;
  decltype(&::ibv_get_device_name) get_device_name = nullptr;
  decltype(&::ibv_open_device) open_device = nullptr;
  decltype(&::ibv_close_device) close_device = nullptr;
  decltype(&::ibv_query_device) query_device = nullptr;
  decltype(&::ibv_query_port) query_port = nullptr;
  decltype(&::_ibv_query_gid_table) query_gid_table = nullptr;
  decltype(&::ibv_alloc_pd) alloc_pd = nullptr;
  decltype(&::ibv_dealloc_pd) dealloc_pd = nullptr;
  decltype(&::ibv_reg_mr) reg_mr = nullptr;
  decltype(&::ibv_dereg_mr) dereg_mr = nullptr;
  decltype(&::ibv_create_comp_channel) create_comp_channel = nullptr;
  decltype(&::ibv_destroy_comp_channel) destroy_comp_channel = nullptr;
  decltype(&::ibv_create_cq) create_cq = nullptr;
  decltype(&::ibv_destroy_cq) destroy_cq = nullptr;
  decltype(&::ibv_get_cq_event) get_cq_event = nullptr;
  decltype(&::ibv_ack_cq_events) ack_cq_events = nullptr;
  decltype(&::ibv_create_qp) create_qp = nullptr;
  decltype(&::ibv_modify_qp) modify_qp = nullptr;
  decltype(&::ibv_destroy_qp) destroy_qp = nullptr;
  decltype(&::ibv_get_async_event) get_async_event = nullptr;
  decltype(&::ibv_ack_async_event) ack_async_event = nullptr;
  decltype(&::ibv_wc_status_str) wc_status_str = nullptr;
  decltype(&::ibv_event_type_str) event_type_str = nullptr;
};

// The reason why something can't be used, for people.
struct Reason {
  std::string text;
};

// Opens the library and finds every function; the reason names the file or the function that is missing. The library stays
// open for good: its providers keep state that no close can end.
[[nodiscard]] std::variant<Verbs, Reason> load_verbs(const char* file = "libibverbs.so.1");

// Objects of libibverbs that destroy themselves. A device's objects must be destroyed before the device: declare it first.
using Device = std::unique_ptr<ibv_context, decltype(Verbs::close_device)>;
using ProtectionDomain = std::unique_ptr<ibv_pd, decltype(Verbs::dealloc_pd)>;
using MemoryRegion = std::unique_ptr<ibv_mr, decltype(Verbs::dereg_mr)>;
using CompletionChannel = std::unique_ptr<ibv_comp_channel, decltype(Verbs::destroy_comp_channel)>;
using CompletionQueue = std::unique_ptr<ibv_cq, decltype(Verbs::destroy_cq)>;
using QueuePair = std::unique_ptr<ibv_qp, decltype(Verbs::destroy_qp)>;

// One port of a device as this host's network sees it.
struct Port {
  std::string device;
  std::uint8_t number = 0;
  std::uint16_t lid = 0;
  bool is_infiniband = false;  // else Ethernet, that is RoCE
  ibv_mtu mtu = IBV_MTU_256;
  std::uint32_t gid_index = 0;  // the GID to connect from
  ibv_gid gid = {};
  std::string interface;  // network interface that carries a RoCE port, "" for InfiniBand
  std::string address;    // the GID as text: an IPv4 or IPv6 address
  std::string unusable;   // "" if the port can be used, else why not
};

// Every port of every device, by name. A RoCE port is usable if it is active and has a RoCE v2 GID that is an address of this
// host. Where hosts are network namespaces of one machine, other hosts' devices are visible too. Throws std::system_error if
// the devices can't be listed.
[[nodiscard]] std::vector<Port> find_ports(const Verbs& verbs);

// Opens a device by name. Throws std::system_error with the device's name and the system's text.
[[nodiscard]] Device open_device(const Verbs& verbs, const std::string& name);

// The state of a port: "active", "down", "init", "armed", or "unknown" with the system's text.
[[nodiscard]] std::string port_state(const Verbs& verbs, ibv_context& device, std::uint8_t port);

}  // namespace adaptra::delegate
