// An IP packet on its way, and the one that ends a TCP connection.
#pragma once

#include <arpa/inet.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>

// The prefix that the kernel puts before every packet, a virtio_net_hdr_mrg_rxbuf, whose size keeps addresses aligned. It says
// whether the packet's checksum is still to be made, and how it would have to be cut. It is all zero where nothing is to be
// done. So big packets cross the links in one piece and unchecked, as between two machines whose network cards do both.
inline constexpr int kPrefix = 12;
inline constexpr std::size_t kMostBytes = kPrefix + (1U << 16);

struct Packet {
  std::unique_ptr<char[]> bytes;  // prefix and packet
  std::size_t size = 0;
};

// A TCP segment's headers; `tcp` is null for any other packet.
struct Segment {
  explicit Segment(const Packet& packet) {
    auto* const start = packet.bytes.get() + kPrefix;
    if (packet.size < kPrefix + sizeof(iphdr) || (*start & 0xf0) != 0x40) return;
    ip = reinterpret_cast<iphdr*>(start);
    const std::size_t header = 4U * ip->ihl;
    if (ip->protocol != IPPROTO_TCP || packet.size < kPrefix + header + sizeof(tcphdr)) return;
    tcp = reinterpret_cast<tcphdr*>(start + header);
    length = static_cast<std::uint32_t>(packet.size - kPrefix - header) - 4U * tcp->doff + tcp->syn + tcp->fin;
  }
  iphdr* ip = nullptr;
  tcphdr* tcp = nullptr;
  std::uint32_t length = 0;  // in sequence numbers
};

inline std::uint16_t internet_checksum(std::span<const char> bytes, std::uint32_t sum = 0) {
  for (std::size_t k = 0; k + 1 < bytes.size(); k += 2) {
    std::uint16_t word = 0;
    std::memcpy(&word, &bytes[k], sizeof word);
    sum += word;
  }
  while ((sum >> 16) != 0) sum = (sum & 0xffff) + (sum >> 16);
  return static_cast<std::uint16_t>(~sum);
}

// The segment that ends the connection of `of`, as if its sender's peer had sent it, or as if the sender itself had.
inline Packet make_reset(const Segment& of, bool to_sender) {
  struct {
    char prefix[kPrefix] = {};
    iphdr ip{};
    tcphdr tcp{};
  } reset;
  reset.ip.version = 4;
  reset.ip.ihl = 5;
  reset.ip.ttl = 64;
  reset.ip.protocol = IPPROTO_TCP;
  reset.ip.tot_len = htons(sizeof reset.ip + sizeof reset.tcp);
  reset.ip.saddr = to_sender ? of.ip->daddr : of.ip->saddr;
  reset.ip.daddr = to_sender ? of.ip->saddr : of.ip->daddr;
  reset.tcp.source = to_sender ? of.tcp->dest : of.tcp->source;
  reset.tcp.dest = to_sender ? of.tcp->source : of.tcp->dest;
  reset.tcp.seq = to_sender ? of.tcp->ack_seq : of.tcp->seq;
  reset.tcp.ack_seq = to_sender ? htonl(ntohl(of.tcp->seq) + of.length) : of.tcp->ack_seq;
  reset.tcp.doff = 5;
  reset.tcp.rst = reset.tcp.ack = 1;
  Packet packet{std::make_unique<char[]>(sizeof reset), sizeof reset};
  std::memcpy(packet.bytes.get(), &reset, sizeof reset);
  const Segment made(packet);
  made.ip->check = internet_checksum({reinterpret_cast<const char*>(made.ip), sizeof(iphdr)});
  // The addresses, the protocol and the length count as part of TCP's checksum; here without the carry, which comes later.
  const std::uint32_t addresses =
      static_cast<std::uint16_t>(~internet_checksum({reinterpret_cast<const char*>(&made.ip->saddr), 8}));
  const std::uint32_t rest = htons(IPPROTO_TCP) + htons(sizeof(tcphdr));
  made.tcp->check = internet_checksum({reinterpret_cast<const char*>(made.tcp), sizeof(tcphdr)}, addresses + rest);
  return packet;
}
