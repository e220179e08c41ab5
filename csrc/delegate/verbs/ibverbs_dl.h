// libibverbs by dlopen: a machine without RDMA needs neither the library nor a rebuild, and learns why verbs are not there.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "delegate/verbs/ibverbs_abi.h"

namespace adaptra::delegate {

// The functions of libibverbs that are symbols. Posting, polling and arming go through the device's own table: see
// ibv_context_ops.
struct Verbs {
  ibv_device** (*get_device_list)(int* count) = nullptr;
  void (*free_device_list)(ibv_device** list) = nullptr;
  const char* (*get_device_name)(ibv_device* device) = nullptr;
  ibv_context* (*open_device)(ibv_device* device) = nullptr;
  int (*close_device)(ibv_context* device) = nullptr;
  int (*query_device)(ibv_context* device, ibv_device_attr* attributes) = nullptr;
  int (*query_port)(ibv_context* device, std::uint8_t port, ibv_port_attr* attributes) = nullptr;
  ssize_t (*query_gid_table)(ibv_context* device, ibv_gid_entry* entries, std::size_t most, std::uint32_t flags,
                             std::size_t entry_bytes) = nullptr;
  ibv_pd* (*alloc_pd)(ibv_context* device) = nullptr;
  int (*dealloc_pd)(ibv_pd* domain) = nullptr;
  ibv_mr* (*reg_mr)(ibv_pd* domain, void* begin, std::size_t bytes, int access) = nullptr;
  int (*dereg_mr)(ibv_mr* region) = nullptr;
  ibv_comp_channel* (*create_comp_channel)(ibv_context* device) = nullptr;
  int (*destroy_comp_channel)(ibv_comp_channel* channel) = nullptr;
  ibv_cq* (*create_cq)(ibv_context* device, int completions, void* context, ibv_comp_channel* channel, int vector) = nullptr;
  int (*destroy_cq)(ibv_cq* queue) = nullptr;
  int (*get_cq_event)(ibv_comp_channel* channel, ibv_cq** queue, void** context) = nullptr;
  void (*ack_cq_events)(ibv_cq* queue, unsigned int events) = nullptr;
  ibv_qp* (*create_qp)(ibv_pd* domain, ibv_qp_init_attr* attributes) = nullptr;
  int (*modify_qp)(ibv_qp* pair, ibv_qp_attr* attributes, int mask) = nullptr;
  int (*destroy_qp)(ibv_qp* pair) = nullptr;
  int (*get_async_event)(ibv_context* device, ibv_async_event* event) = nullptr;
  void (*ack_async_event)(ibv_async_event* event) = nullptr;
  const char* (*wc_status_str)(ibv_wc_status status) = nullptr;
  const char* (*event_type_str)(ibv_event_type event) = nullptr;
};

// The reason why something can't be used, for people.
struct Reason {
  std::string text;
};

// Opens the library and finds every function; the reason names what is missing, and what to install. The library stays
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
