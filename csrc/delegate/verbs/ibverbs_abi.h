// The part of libibverbs' binary interface that the verbs wire uses, so that adaptra is built alike with and without
// libibverbs' own header. That interface has been stable since libibverbs 1.1. Names are those of the library; members that
// are not used here only keep their place. tests/cxx/verbs_abi_tests.cc compares every place and value with the library's
// header, where that is installed.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace adaptra::delegate {

// Objects of which only the library knows the inside.
struct ibv_device;
struct ibv_pd;
struct ibv_srq;

struct ibv_context;
struct ibv_cq;
struct ibv_qp;

enum ibv_mtu : std::uint32_t { IBV_MTU_256 = 1, IBV_MTU_512, IBV_MTU_1024, IBV_MTU_2048, IBV_MTU_4096 };

enum ibv_port_state : std::uint32_t {
  IBV_PORT_NOP,
  IBV_PORT_DOWN,
  IBV_PORT_INIT,
  IBV_PORT_ARMED,
  IBV_PORT_ACTIVE,
  IBV_PORT_ACTIVE_DEFER
};

enum ibv_link_layer : std::uint8_t { IBV_LINK_LAYER_UNSPECIFIED, IBV_LINK_LAYER_INFINIBAND, IBV_LINK_LAYER_ETHERNET };

enum ibv_gid_type : std::uint32_t { IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2 };

// The events that are told apart; there are more.
enum ibv_event_type : std::uint32_t {
  IBV_EVENT_CQ_ERR = 0,
  IBV_EVENT_QP_FATAL = 1,
  IBV_EVENT_QP_REQ_ERR = 2,
  IBV_EVENT_QP_ACCESS_ERR = 3,
  IBV_EVENT_DEVICE_FATAL = 8
};

enum ibv_wc_status : std::uint32_t { IBV_WC_SUCCESS = 0 };
enum ibv_wc_opcode : std::uint32_t { IBV_WC_RECV = 128, IBV_WC_RECV_RDMA_WITH_IMM = 129 };
inline constexpr unsigned int IBV_WC_WITH_IMM = 2;

enum ibv_wr_opcode : std::uint32_t { IBV_WR_RDMA_WRITE_WITH_IMM = 1, IBV_WR_SEND = 2, IBV_WR_SEND_WITH_IMM = 3 };
inline constexpr unsigned int IBV_SEND_SIGNALED = 2;
inline constexpr unsigned int IBV_SEND_SOLICITED = 4;
inline constexpr unsigned int IBV_SEND_INLINE = 8;

inline constexpr int IBV_ACCESS_LOCAL_WRITE = 1;
inline constexpr int IBV_ACCESS_REMOTE_WRITE = 2;

enum ibv_qp_type : std::uint32_t { IBV_QPT_RC = 2 };
enum ibv_qp_state : std::uint32_t { IBV_QPS_INIT = 1, IBV_QPS_RTR = 2, IBV_QPS_RTS = 3 };

// Which members of ibv_qp_attr a change is about.
inline constexpr int IBV_QP_STATE = 1 << 0;
inline constexpr int IBV_QP_ACCESS_FLAGS = 1 << 3;
inline constexpr int IBV_QP_PKEY_INDEX = 1 << 4;
inline constexpr int IBV_QP_PORT = 1 << 5;
inline constexpr int IBV_QP_AV = 1 << 7;
inline constexpr int IBV_QP_PATH_MTU = 1 << 8;
inline constexpr int IBV_QP_TIMEOUT = 1 << 9;
inline constexpr int IBV_QP_RETRY_CNT = 1 << 10;
inline constexpr int IBV_QP_RNR_RETRY = 1 << 11;
inline constexpr int IBV_QP_RQ_PSN = 1 << 12;
inline constexpr int IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13;
inline constexpr int IBV_QP_MIN_RNR_TIMER = 1 << 15;
inline constexpr int IBV_QP_SQ_PSN = 1 << 16;
inline constexpr int IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17;
inline constexpr int IBV_QP_DEST_QPN = 1 << 20;

union ibv_gid {
  std::uint8_t raw[16];
  std::uint64_t halves[2];  // gives the union its alignment
};

struct ibv_gid_entry {
  ibv_gid gid;
  std::uint32_t gid_index;
  std::uint32_t port_num;
  std::uint32_t gid_type;
  std::uint32_t ndev_ifindex;
};

struct ibv_device_attr {
  char unused_version[64];
  std::uint64_t unused_sizes[4];
  std::uint32_t unused_vendor[3];
  int unused_pairs[2];
  unsigned int unused_capabilities;
  int unused_pieces[3];
  int max_cqe;
  int unused_limits[22];
  std::uint16_t unused_keys;
  std::uint8_t unused_delay;
  std::uint8_t phys_port_cnt;
};

// As the symbol ibv_query_port fills it in. Its later members are reached by another way, which adaptra doesn't need.
struct ibv_port_attr {
  ibv_port_state state;
  ibv_mtu unused_most;
  ibv_mtu active_mtu;
  std::uint32_t unused_counts[5];
  std::uint16_t unused_keys;
  std::uint16_t lid;
  std::uint16_t unused_manager;
  std::uint8_t unused_bytes[8];
  std::uint8_t link_layer;
  std::uint8_t unused_flags;
};

struct ibv_async_event {
  union {
    ibv_cq* cq;
    ibv_qp* qp;
    int port_num;
  } element;
  ibv_event_type event_type;
};

struct ibv_wc {
  std::uint64_t wr_id;
  ibv_wc_status status;
  ibv_wc_opcode opcode;
  std::uint32_t vendor_err;
  std::uint32_t byte_len;
  std::uint32_t imm_data;  // in network byte order
  std::uint32_t unused_numbers[2];
  unsigned int wc_flags;
  std::uint16_t unused_path[2];
  std::uint8_t unused_level[2];
};

struct ibv_mr {
  ibv_context* context;
  ibv_pd* pd;
  void* addr;
  std::size_t length;
  std::uint32_t handle;
  std::uint32_t lkey;
  std::uint32_t rkey;
};

struct ibv_global_route {
  ibv_gid dgid;
  std::uint32_t flow_label;
  std::uint8_t sgid_index;
  std::uint8_t hop_limit;
  std::uint8_t traffic_class;
};

struct ibv_ah_attr {
  ibv_global_route grh;
  std::uint16_t dlid;
  std::uint8_t unused_path[3];
  std::uint8_t is_global;
  std::uint8_t port_num;
};

struct ibv_qp_cap {
  std::uint32_t max_send_wr;
  std::uint32_t max_recv_wr;
  std::uint32_t max_send_sge;
  std::uint32_t max_recv_sge;
  std::uint32_t max_inline_data;
};

struct ibv_qp_init_attr {
  void* qp_context;
  ibv_cq* send_cq;
  ibv_cq* recv_cq;
  ibv_srq* srq;
  ibv_qp_cap cap;
  ibv_qp_type qp_type;
  int sq_sig_all;
};

struct ibv_qp_attr {
  ibv_qp_state qp_state;
  ibv_qp_state unused_current;
  ibv_mtu path_mtu;
  std::uint32_t unused_migration[2];
  std::uint32_t rq_psn;
  std::uint32_t sq_psn;
  std::uint32_t dest_qp_num;
  unsigned int qp_access_flags;
  ibv_qp_cap cap;
  ibv_ah_attr ah_attr;
  ibv_ah_attr unused_alternative;
  std::uint16_t pkey_index;
  std::uint16_t unused_key;
  std::uint8_t unused_drain[2];
  std::uint8_t max_rd_atomic;
  std::uint8_t max_dest_rd_atomic;
  std::uint8_t min_rnr_timer;
  std::uint8_t port_num;
  std::uint8_t timeout;
  std::uint8_t retry_cnt;
  std::uint8_t rnr_retry;
  std::uint8_t unused_port[2];
  std::uint32_t unused_rate;
};

struct ibv_sge {
  std::uint64_t addr;
  std::uint32_t length;
  std::uint32_t lkey;
};

struct ibv_send_wr {
  std::uint64_t wr_id;
  ibv_send_wr* next;
  ibv_sge* sg_list;
  int num_sge;
  ibv_wr_opcode opcode;
  unsigned int send_flags;
  std::uint32_t imm_data;  // in network byte order
  union {
    struct {
      std::uint64_t remote_addr;
      std::uint32_t rkey;
    } rdma;
    std::uint64_t unused[4];
  } wr;
  std::uint32_t unused_number;
  std::uint64_t unused_window[6];
};

struct ibv_recv_wr {
  std::uint64_t wr_id;
  ibv_recv_wr* next;
  ibv_sge* sg_list;
  int num_sge;
};

struct ibv_comp_channel {
  ibv_context* context;
  int fd;
};

// The beginning of what the library keeps: it makes these itself.
struct ibv_cq {
  ibv_context* context;
  ibv_comp_channel* channel;
  void* cq_context;
  std::uint32_t handle;
  int cqe;
};

struct ibv_qp {
  ibv_context* context;
  void* qp_context;
  ibv_pd* pd;
  ibv_cq* send_cq;
  ibv_cq* recv_cq;
  ibv_srq* srq;
  std::uint32_t handle;
  std::uint32_t qp_num;
};

// What a device's driver does itself, without a system call where it can.
struct ibv_context_ops {
  void (*unused_first[11])();
  int (*poll_cq)(ibv_cq* queue, int most, ibv_wc* completions);
  int (*req_notify_cq)(ibv_cq* queue, int only_solicited);
  void (*unused_middle[12])();
  int (*post_send)(ibv_qp* pair, ibv_send_wr* requests, ibv_send_wr** refused);
  int (*post_recv)(ibv_qp* pair, ibv_recv_wr* requests, ibv_recv_wr** refused);
  void (*unused_last[5])();
};

struct ibv_context {
  ibv_device* device;
  ibv_context_ops ops;
  int cmd_fd;
  int async_fd;
};

}  // namespace adaptra::delegate
