// One connection of the verbs wire: a queue pair, the registrations that belong to it, and the frames that wait for it.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "delegate/system/descriptor.h"
#include "delegate/verbs/verbs_queue_pair.h"
#include "delegate/verbs/verbs_wire.h"
#include "delegate/wire/memory.h"

namespace adaptra::delegate {

// Sends and receives of one connection that may be under way at a time: all of them may leave a completion.
inline constexpr int kRequestsPerConnection = 512;
inline constexpr std::uint32_t kSends = 256;
inline constexpr std::uint32_t kReceives = 256;
static_assert(kSends + kReceives == kRequestsPerConnection);
// A chunk of at most this size whose header must travel is sent beside it, into the peer's next receive. That costs a copy but
// is one request in place of two.
inline constexpr std::uint32_t kBesideBytes = 4544;
inline constexpr std::size_t kReceiveCellBytes = kFrameBytes + kBesideBytes;
inline constexpr std::size_t kSendCellBytes = kFrameBytes + kHeadBytes;
inline constexpr std::size_t kExposureBytes = 12;
// A request's number says whether it is a send or a receive.
inline constexpr std::uint32_t kReceiveBit = 1U << 31;
inline constexpr std::uint32_t kNumbers = kReceiveBit - 1;

class VerbsConnection : public Connection, public Handler {
 public:
  // Throws std::system_error.
  VerbsConnection(VerbsWire& wire, Descriptor socket, std::uint32_t serial, ChannelClass channel, Sink& sink);
  ~VerbsConnection() override;

  void expose(std::uint32_t slot, const Memory& memory) override;
  void withdraw(std::uint32_t slot) noexcept override;
  [[nodiscard]] bool can_post(std::uint32_t slot) const override;
  void post(const Frame& chunk, const Memory& message, bool may_be_bare) override;
  [[nodiscard]] bool holds(const Memory& message) const override;
  void send(const Frame& frame, std::span<const std::byte> payload) override;
  void flush() override;
  void close() noexcept override;
  [[nodiscard]] Clock::time_point heard() override;
  // The device manages a queue pair's window.
  [[nodiscard]] Pace pace() override { return {}; }

  // Reads the socket: first the exchange of greetings, then only the peer's end.
  void ready(std::uint32_t events) override;

  // Handles one completion of this connection's queue pair.
  void completed(const ibv_wc& completion);
  // Called once all completions have been handed over: sends what they made room for.
  void resume();
  void fail(const std::string& reason);
  void tell_broken() { fail(broken_); }
  void forget(const Memory& memory) noexcept { registered_.erase(memory.id); }
  [[nodiscard]] bool is_pair(const ibv_qp* pair) const { return pair_.get() == pair; }

 private:
  // A slot of the peer, to write to.
  struct Remote {
    std::uint64_t address = 0;
    std::uint64_t bytes = 0;
    std::uint32_t key = 0;
  };
  // A slot of this rank that the peer may write to.
  struct Exposed {
    std::byte* begin = nullptr;
    MemoryRegion region;
  };
  // The form in which a frame travels.
  enum class Form {
    kFrame,   // one send
    kBeside,  // a small chunk: one send of header and bytes
    kBehind,  // a chunk: a send of its header, then its bytes are written; the immediate value counts such chunks
    kBare,    // a message: its bytes are written; the immediate value is its header's checksum
  };
  struct Out {
    FrameBytes header;
    std::uint32_t payload_bytes = 0;
    std::array<std::byte, kHeadBytes> payload;  // of a control frame
    Remote where;                               // of a chunk
    const std::byte* chunk = nullptr;           // null for a control frame
    std::uint32_t key = 0;
    std::uint64_t memory = 0;
    Form form = Form::kFrame;
    bool is_urgent = true;
  };
  struct Batch;
  // A posted request whose completion has not come.
  struct Posted {
    std::uint64_t memory = 0;  // the memory that it reads, 0 for a cell
    std::uint32_t bytes = 0;
  };

  MemoryRegion register_memory(std::span<std::byte> bytes, int access);
  void greet();
  void exchanged();
  [[nodiscard]] bool can_flush() const;
  void add(Batch& batch, const Out& out);
  void post_receive(std::uint32_t cell);
  void received(const ibv_wc& completion);
  void received_frame(std::span<const std::byte> bytes);
  void received_chunk(std::uint32_t bytes, std::uint32_t number);
  void received_beside(const Frame& frame, std::span<const std::byte> payload);
  void received_exposure(const Frame& frame, std::span<const std::byte> payload);
  void return_credits();
  [[nodiscard]] std::uint64_t request_id(std::uint32_t number) const;
  void break_later(std::string reason);

  VerbsWire& wire_;
  Descriptor socket_;
  std::uint32_t serial_;
  Sink& sink_;
  const std::uint64_t most_queued_;  // bytes of chunks
  bool closed_ = false;
  bool established_ = false;
  std::string broken_;

  ProtectionDomain domain_;  // of its own, so that no other connection can use its keys
  Pages cells_;              // of receives, then of sends
  MemoryRegion cells_region_;
  std::unordered_map<std::uint64_t, MemoryRegion> registered_;  // messages, by the id of their memory
  std::unordered_map<std::uint32_t, Exposed> exposed_;          // by slot
  QueueSizes sizes_;
  QueuePair pair_;
  Greeting own_;
  std::vector<std::byte> heard_bytes_;  // of the socket

  std::unordered_map<std::uint32_t, Remote> remote_;  // by slot
  std::deque<Out> waiting_;
  std::deque<Posted> posted_;  // requests from first_posted_ on
  std::uint32_t first_posted_ = 0;
  std::uint32_t next_request_ = 0;
  std::uint64_t queued_bytes_ = 0;  // of chunks that wait or are posted
  std::uint32_t credits_;           // receives that the peer has for us
  std::uint32_t chunks_sent_ = 0;

  std::deque<Frame> announced_;  // headers whose chunks have not come
  std::uint32_t chunks_received_ = 0;
  std::uint32_t consumed_ = 0;  // receives since credits were returned
  bool has_room_ = false;       // something completed since the sink was told
  bool was_heard_ = false;      // since heard() was called last
  Clock::time_point heard_;
};

}  // namespace adaptra::delegate
