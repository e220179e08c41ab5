#include "delegate/verbs/verbs_queue_pair.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "delegate/system/little_endian.h"

namespace adaptra::delegate {
namespace {

constexpr std::uint64_t kMagic = 0x51a7;
constexpr std::uint64_t kVersion = 1;

// A lost packet is repeated after 4.096 µs · 2^14 = 67 ms; after 6 repetitions, 0.47 s, the queue pair gives up. 7 would mean:
// for ever.
constexpr std::uint8_t kTimeout = 14;
constexpr std::uint8_t kRetries = 6;
// A peer that has no receive posted, which credits prevent, is asked again after 0.64 ms, up to 6 times.
constexpr std::uint8_t kReceiverRetries = 6;
constexpr std::uint8_t kReceiverTimer = 12;
constexpr std::uint8_t kHops = 64;

void modify(const Verbs& verbs, ibv_qp& pair, ibv_qp_attr& attributes, int mask, const char* to) {
  if (const int error = verbs.modify_qp(&pair, &attributes, mask); error != 0) {
    throw std::system_error(error, std::generic_category(), std::string("queue pair to ") + to);
  }
}

}  // namespace

GreetingBytes encode(const Greeting& greeting) {
  GreetingBytes bytes{};
  put(bytes, 0, 2, kMagic);
  put(bytes, 2, 1, kVersion);
  put(bytes, 3, 1, greeting.is_infiniband ? 1 : 0);
  put(bytes, 4, 4, greeting.number);
  put(bytes, 8, 4, greeting.first_packet);
  put(bytes, 12, 2, greeting.lid);
  put(bytes, 14, 1, static_cast<std::uint64_t>(greeting.mtu));
  std::memcpy(&bytes[16], greeting.gid.raw, sizeof greeting.gid.raw);
  return bytes;
}

bool decode(std::span<const std::byte, kGreetingBytes> bytes, Greeting& greeting, std::string& reason) {
  if (get(bytes, 0, 2) != kMagic || get(bytes, 2, 1) != kVersion) {
    reason = "its peer speaks no verbs of version 1 here";
    return false;
  }
  greeting.is_infiniband = get(bytes, 3, 1) == 1;
  greeting.number = get32(bytes, 4);
  greeting.first_packet = get32(bytes, 8);
  greeting.lid = static_cast<std::uint16_t>(get(bytes, 12, 2));
  const std::uint64_t mtu = get(bytes, 14, 1);
  std::memcpy(greeting.gid.raw, &bytes[16], sizeof greeting.gid.raw);
  if (mtu < IBV_MTU_256 || mtu > IBV_MTU_4096 || greeting.number >= 1U << 24 || greeting.first_packet >= 1U << 24) {
    reason = "its peer's queue pair has an impossible number or packet size";
    return false;
  }
  greeting.mtu = static_cast<ibv_mtu>(mtu);
  return true;
}

QueuePair make_queue_pair(const Verbs& verbs, ibv_pd& domain, ibv_cq& completions, const Port& port, const QueueSizes& wanted,
                          QueueSizes& got) {
  ibv_qp_init_attr attributes{};
  attributes.send_cq = attributes.recv_cq = &completions;
  attributes.qp_type = IBV_QPT_RC;
  QueuePair pair(nullptr, verbs.destroy_qp);
  // A device refuses to send more inline than it can, and none tells how much that is: try less and less.
  for (std::uint32_t inline_bytes = wanted.inline_bytes;; inline_bytes /= 2) {
    attributes.cap = {wanted.sends, wanted.receives, 2, 1, inline_bytes};  // two pieces: a header and a small chunk
    pair.reset(verbs.create_qp(&domain, &attributes));
    if (pair != nullptr) break;
    if (inline_bytes == 0) throw std::system_error(errno, std::generic_category(), "making a queue pair");
  }
  got = {wanted.sends, wanted.receives, attributes.cap.max_inline_data};
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_INIT;
  change.port_num = port.number;
  change.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  modify(verbs, *pair, change, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "INIT");
  return pair;
}

void connect(const Verbs& verbs, ibv_qp& pair, const Port& port, const Greeting& own, const Greeting& peer) {
  if (peer.is_infiniband != port.is_infiniband) {
    throw std::invalid_argument(std::string("this port is ") + (port.is_infiniband ? "InfiniBand" : "Ethernet") +
                                ", its peer's is not");
  }
  ibv_qp_attr change{};
  change.qp_state = IBV_QPS_RTR;
  change.path_mtu = std::min(own.mtu, peer.mtu);
  change.dest_qp_num = peer.number;
  change.rq_psn = peer.first_packet;
  change.max_dest_rd_atomic = 1;
  change.min_rnr_timer = kReceiverTimer;
  change.ah_attr.port_num = port.number;
  if (port.is_infiniband) {
    change.ah_attr.dlid = peer.lid;
  } else {
    change.ah_attr.is_global = 1;
    change.ah_attr.grh.dgid = peer.gid;
    change.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(port.gid_index);
    change.ah_attr.grh.hop_limit = kHops;
  }
  modify(verbs, pair, change,
         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
             IBV_QP_MIN_RNR_TIMER,
         "ready to receive");
  change = {};
  change.qp_state = IBV_QPS_RTS;
  change.timeout = kTimeout;
  change.retry_cnt = kRetries;
  change.rnr_retry = kReceiverRetries;
  change.sq_psn = own.first_packet;
  change.max_rd_atomic = 1;
  modify(verbs, pair, change,
         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
         "ready to send");
}

}  // namespace adaptra::delegate
