// A reliable queue pair from its making to ready-to-send, and the greeting that its two ends exchange for that.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "delegate/verbs/ibverbs_dl.h"

namespace adaptra::delegate {

inline constexpr std::size_t kGreetingBytes = 48;

// One end of a queue pair, as the other end must know it.
struct Greeting {
  std::uint32_t number = 0;
  std::uint32_t first_packet = 0;  // 24 bits
  std::uint16_t lid = 0;
  bool is_infiniband = false;
  ibv_mtu mtu = IBV_MTU_256;
  ibv_gid gid = {};
};

using GreetingBytes = std::array<std::byte, kGreetingBytes>;

[[nodiscard]] GreetingBytes encode(const Greeting& greeting);

// False, with a reason for people, if these bytes are no greeting.
[[nodiscard]] bool decode(std::span<const std::byte, kGreetingBytes> bytes, Greeting& greeting, std::string& reason);

// The work requests that one queue pair can hold, and the bytes that a request can carry itself, without registered memory.
struct QueueSizes {
  std::uint32_t sends = 0;
  std::uint32_t receives = 0;
  std::uint32_t inline_bytes = 0;
};

// Makes a queue pair that takes receives, but is not connected. Devices that can't send as many bytes inline as `wanted` says
// get fewer; `got` says how many. Throws std::system_error.
[[nodiscard]] QueuePair make_queue_pair(const Verbs& verbs, ibv_pd& domain, ibv_cq& completions, const Port& port,
                                        const QueueSizes& wanted, QueueSizes& got);

// Connects it: from then on it sends and receives. Waits until the kernel knows the neighbour's hardware address, which it does
// where a TCP connection to the same address exists. Throws std::system_error, and std::invalid_argument if the ends don't fit.
void connect(const Verbs& verbs, ibv_qp& pair, const Port& port, const Greeting& own, const Greeting& peer);

}  // namespace adaptra::delegate
