#include "delegate/verbs/verbs_connection.h"

#include <arpa/inet.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "delegate/system/sockets.h"

namespace adaptra::delegate {
namespace {

// Receives reserved for frames that return credits, of which there are never more on the way.
constexpr std::uint32_t kReservedReceives = 8;
constexpr std::size_t kBatch = 32;
// One request in this many signals its completion, and so does the last of a batch.
constexpr std::uint32_t kSignalEvery = 16;
// Enough to fill a long link. Chunks queued here are out of reach of a better path.
constexpr std::uint64_t kQueuedBytes = 32U << 20;
// The device gives every queue pair its turn: what is queued here of bulk messages can give way to no other any more.
constexpr std::uint64_t kBulkQueuedBytes = 8U << 20;
constexpr std::byte kReady{0x52};

}  // namespace

VerbsConnection::VerbsConnection(VerbsWire& wire, Descriptor socket, std::uint32_t serial, ChannelClass channel, Sink& sink)
    : wire_(wire),
      socket_(std::move(socket)),
      serial_(serial),
      sink_(sink),
      most_queued_(gives_way(channel) ? kBulkQueuedBytes : kQueuedBytes),
      domain_(wire.verbs_.alloc_pd(wire.device_.get()), wire.verbs_.dealloc_pd),
      cells_(0, kReceives * kReceiveCellBytes + kSends * kSendCellBytes),
      cells_region_(nullptr, wire.verbs_.dereg_mr),
      pair_(nullptr, wire.verbs_.destroy_qp),
      credits_(kReceives - kReservedReceives),
      heard_(Clock::now()) {
  if (domain_ == nullptr) throw std::system_error(errno, std::generic_category(), wire_.name() + ": protection domain");
  cells_region_ = register_memory(cells_.memory().bytes, IBV_ACCESS_LOCAL_WRITE);
  const QueueSizes wanted = {kSends, kReceives, kSendCellBytes};
  pair_ = make_queue_pair(wire_.verbs_, *domain_, *wire_.completions_, wire_.port_, wanted, sizes_);
  for (std::uint32_t cell = 0; cell < kReceives; ++cell) post_receive(cell);
  greet();
  wire_.poller_.add(socket_.get(), EPOLLIN, *this);
}

VerbsConnection::~VerbsConnection() { close(); }

MemoryRegion VerbsConnection::register_memory(std::span<std::byte> bytes, int access) {
  MemoryRegion region(wire_.verbs_.reg_mr(domain_.get(), bytes.data(), bytes.size(), access), wire_.verbs_.dereg_mr);
  if (region == nullptr) {
    throw std::system_error(errno, std::generic_category(),
                            wire_.name() + ": registering " + std::to_string(bytes.size()) + " bytes");
  }
  return region;
}

void VerbsConnection::greet() {
  own_ = {pair_->qp_num, 0, wire_.port_.lid, wire_.port_.is_infiniband, wire_.port_.mtu, wire_.port_.gid};
  // Random, so that late packets of an earlier queue pair are not taken for this one's.
  if (getrandom(&own_.first_packet, sizeof own_.first_packet, 0) != sizeof own_.first_packet) own_.first_packet = serial_;
  own_.first_packet &= (1U << 24) - 1;
  const GreetingBytes bytes = encode(own_);
  // A new socket has room for these few bytes.
  if (::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) != static_cast<ssize_t>(bytes.size())) {
    throw std::system_error(errno, std::generic_category(), wire_.name() + ": exchange with the peer");
  }
}

void VerbsConnection::ready(std::uint32_t) {
  std::array<std::byte, kGreetingBytes + 2> bytes;
  const ssize_t got = ::recv(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got < 0) return fail(error_text(errno));
  if (got == 0) return fail(std::string(kPeerEnded));
  if (heard_bytes_.size() + static_cast<std::size_t>(got) > kGreetingBytes + 1) return fail("its peer sent more than expected");
  const bool was_greeted = heard_bytes_.size() >= kGreetingBytes;
  heard_bytes_.insert(heard_bytes_.end(), bytes.begin(), bytes.begin() + got);
  if (!was_greeted && heard_bytes_.size() >= kGreetingBytes) exchanged();
  if (!closed_ && heard_bytes_.size() == kGreetingBytes + 1) {
    if (heard_bytes_.back() != kReady) return fail("its peer sent something unexpected");
    if (!std::exchange(established_, true)) sink_.established(*this);
  }
}

void VerbsConnection::exchanged() {
  Greeting peer;
  std::string reason;
  if (!decode(std::span<const std::byte, kGreetingBytes>(heard_bytes_.data(), kGreetingBytes), peer, reason)) {
    return fail(reason);
  }
  try {
    connect(wire_.verbs_, *pair_, wire_.port_, own_, peer);
  } catch (const std::exception& error) {
    return fail(error.what());
  }
  if (::send(socket_.get(), &kReady, 1, MSG_NOSIGNAL | MSG_DONTWAIT) != 1) fail(error_text(errno));
}

void VerbsConnection::expose(std::uint32_t slot, const Memory& memory) {
  if (closed_) return;
  try {
    Exposed exposed = {memory.bytes.data(), register_memory(memory.bytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)};
    const auto address = reinterpret_cast<std::uintptr_t>(memory.bytes.data());
    std::array<std::byte, kExposureBytes> where;
    for (std::size_t k = 0; k < 8; ++k) where[k] = static_cast<std::byte>(address >> (8 * k));
    for (std::size_t k = 0; k < 4; ++k) where[8 + k] = static_cast<std::byte>(exposed.region->rkey >> (8 * k));
    exposed_.insert_or_assign(slot, std::move(exposed));
    Frame frame;
    frame.kind = FrameKind::kExpose;
    frame.slot = slot;
    frame.total = memory.bytes.size();
    frame.length = kExposureBytes;
    send(frame, where);
  } catch (const std::system_error& error) {
    break_later(error.what());
  }
}

void VerbsConnection::withdraw(std::uint32_t slot) noexcept { exposed_.erase(slot); }

bool VerbsConnection::can_post(std::uint32_t slot) const {
  if (!established_ || closed_ || !remote_.contains(slot)) return false;
  if (waiting_.size() < kSends / 2 && queued_bytes_ < most_queued_) return true;
  wire_.notice_all();
  return false;
}

void VerbsConnection::post(const Frame& chunk, const Memory& message, bool may_be_bare) {
  if (closed_) return;
  const auto remote = remote_.find(chunk.slot);
  if (remote == remote_.end() || chunk.offset > remote->second.bytes || chunk.length > remote->second.bytes - chunk.offset) {
    return break_later("a chunk does not fit the slot that its peer exposed");
  }
  try {
    auto registered = registered_.find(message.id);
    if (registered == registered_.end()) {
      registered = registered_.emplace(message.id, register_memory(message.bytes, 0)).first;
    }
    Out& out = waiting_.emplace_back();
    out.header = encode(chunk);
    out.where = {remote->second.address + chunk.offset, chunk.length, remote->second.key};
    out.form = may_be_bare ? Form::kBare : chunk.length <= kBesideBytes ? Form::kBeside : Form::kBehind;
    out.chunk = message.bytes.data() + chunk.offset;
    out.key = registered->second->lkey;
    out.memory = message.id;
    queued_bytes_ += chunk.length;
  } catch (const std::system_error& error) {
    break_later(error.what());
  }
}

bool VerbsConnection::holds(const Memory& message) const {
  const auto reads = [&message](const auto& request) { return request.memory == message.id; };
  const bool is_held =
      std::any_of(waiting_.begin(), waiting_.end(), reads) || std::any_of(posted_.begin(), posted_.end(), reads);
  if (is_held) wire_.notice_all();  // the caller waits for the answer to change
  return is_held;
}

Clock::time_point VerbsConnection::heard() {
  // The clock is read only here: where it is slow, it would be a large part of a small message's latency.
  if (std::exchange(was_heard_, false)) heard_ = Clock::now();
  return heard_;
}

void VerbsConnection::send(const Frame& frame, std::span<const std::byte> payload) {
  if (closed_) return;
  Out& out = waiting_.emplace_back();
  out.header = encode(frame);
  out.payload_bytes = static_cast<std::uint32_t>(payload.size());
  out.is_urgent = frame.kind != FrameKind::kHeartbeat;
  std::memcpy(out.payload.data(), payload.data(), payload.size());
}

// A list of requests that go to the device together, with the pieces of memory that they name.
struct VerbsConnection::Batch {
  std::array<ibv_send_wr, kBatch> requests{};
  std::array<ibv_sge, 2 * kBatch> pieces{};
  std::size_t count = 0, piece_count = 0;

  ibv_send_wr& add(ibv_wr_opcode opcode, std::uint64_t id) {
    ibv_send_wr& request = requests[count];
    request.wr_id = id;
    request.opcode = opcode;
    request.sg_list = &pieces[piece_count];
    if (count > 0) requests[count - 1].next = &request;
    ++count;
    return request;
  }
  void piece(ibv_send_wr& request, const std::byte* bytes, std::uint32_t length, std::uint32_t key) {
    pieces[piece_count++] = {reinterpret_cast<std::uintptr_t>(bytes), length, key};
    ++request.num_sge;
  }
};

// A chunk takes up to two requests; one more stays free for returning credits.
bool VerbsConnection::can_flush() const { return !waiting_.empty() && credits_ >= 2 && posted_.size() + 3 <= kSends; }

void VerbsConnection::flush() {
  while (!closed_ && established_ && can_flush()) {
    Batch batch;
    while (can_flush() && batch.count + 2 <= kBatch) {
      add(batch, waiting_.front());
      waiting_.pop_front();
    }
    batch.requests[batch.count - 1].send_flags |= IBV_SEND_SIGNALED;
    ibv_send_wr* refused = nullptr;
    if (const int error = pair_->context->ops.post_send(pair_.get(), batch.requests.data(), &refused); error != 0) {
      return break_later("posting a send: " + error_text(error));
    }
  }
  if (!closed_ && established_ && !waiting_.empty()) wire_.notice_all();
}

void VerbsConnection::add(Batch& batch, const Out& out) {
  const auto request = [&](ibv_wr_opcode opcode, bool is_urgent, const Posted& posted) -> ibv_send_wr& {
    ibv_send_wr& made = batch.add(opcode, request_id(next_request_));
    if (next_request_ % kSignalEvery == 0) made.send_flags |= IBV_SEND_SIGNALED;
    // The peer sleeps until something urgent comes.
    if (is_urgent) made.send_flags |= IBV_SEND_SOLICITED;
    next_request_ = (next_request_ + 1) & kNumbers;
    posted_.push_back(posted);
    --credits_;
    return made;
  };
  const auto send_frame = [&](const Posted& posted) -> ibv_send_wr& {
    std::byte* const cell =
        cells_.memory().bytes.data() + kReceives * kReceiveCellBytes + next_request_ % kSends * kSendCellBytes;
    std::memcpy(cell, out.header.data(), kFrameBytes);
    std::memcpy(cell + kFrameBytes, out.payload.data(), out.payload_bytes);
    const auto bytes = static_cast<std::uint32_t>(kFrameBytes + out.payload_bytes);
    ibv_send_wr& made = request(IBV_WR_SEND, out.is_urgent, posted);
    batch.piece(made, cell, bytes, cells_region_->lkey);
    if (out.form != Form::kBeside && bytes <= sizes_.inline_bytes) made.send_flags |= IBV_SEND_INLINE;
    return made;
  };
  const auto chunk_bytes = static_cast<std::uint32_t>(out.where.bytes);
  const auto write = [&](std::uint32_t immediate) {
    ibv_send_wr& made = request(IBV_WR_RDMA_WRITE_WITH_IMM, true, {out.memory, chunk_bytes});
    batch.piece(made, out.chunk, chunk_bytes, out.key);
    made.imm_data = htonl(immediate);
    made.wr.rdma = {out.where.address, out.where.key};
  };
  switch (out.form) {
    case Form::kFrame: send_frame({}); return;
    case Form::kBeside: batch.piece(send_frame({out.memory, chunk_bytes}), out.chunk, chunk_bytes, out.key); return;
    case Form::kBehind:
      send_frame({});
      write(chunks_sent_++);
      return;
    case Form::kBare: write(header_checksum(out.header)); return;
  }
}

void VerbsConnection::close() noexcept {
  if (std::exchange(closed_, true)) return;
  wire_.poller_.remove(socket_.get());
  wire_.connections_.erase(serial_);
  std::erase(wire_.broken_, this);
  // From here on the device neither reads messages nor writes to slots.
  pair_.reset();
  exposed_.clear();
  registered_.clear();
  waiting_.clear();
  posted_.clear();
  queued_bytes_ = 0;
  socket_ = Descriptor();
}

void VerbsConnection::fail(const std::string& reason) {
  if (closed_) return;
  const std::string text = reason;  // a copy, as `reason` may be a member
  close();
  sink_.failed(*this, text);
}

void VerbsConnection::break_later(std::string reason) {
  if (!broken_.empty()) return;
  broken_ = std::move(reason);
  wire_.broken_.push_back(this);
}

std::uint64_t VerbsConnection::request_id(std::uint32_t number) const {
  return static_cast<std::uint64_t>(serial_) << 32 | number;
}

}  // namespace adaptra::delegate
