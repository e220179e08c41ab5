#include "delegate/tcp/tcp_wire.h"

#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <system_error>
#include <utility>

#include "delegate/system/descriptor.h"
#include "delegate/system/sockets.h"
#include "delegate/tcp/tcp_pace.h"

namespace adaptra::delegate {
namespace {

// Small enough that the checksum leaves a chunk in the processor's cache for the kernel's copy. Large enough for few system
// calls and for few wake-ups of this thread, which wakes once a chunk.
constexpr std::uint32_t kChunkBytes = 512U << 10;
// Bytes that a connection holds are out of reach of a better path, and of the other connections when it turns slow. So it
// holds, here and unsent in the kernel, no more than keeps the kernel busy without waking this thread all the time. The kernel
// asks for more when half of it is left.
constexpr unsigned kUnsentBytes = 2 * kChunkBytes;
// Bytes posted at a time: as many as the kernel takes at once. So it copies what the checksum has just brought into the cache.
constexpr std::size_t kTurnBytes = kUnsentBytes / 2;
constexpr std::size_t kPieces = 32;  // of memory per system call
constexpr std::size_t kStagingBytes = 8192;
constexpr std::size_t kScratchBytes = 64U << 10;
// Bytes read before other connections get their turn; epoll reports the rest again.
constexpr std::size_t kReadBudget = 4U << 20;

}  // namespace

class TcpConnection : public Connection, public Handler {
 public:
  TcpConnection(TcpWire& wire, Descriptor socket, Sink& sink)
      : wire_(wire), socket_(std::move(socket)), sink_(sink), pace_(socket_.get()) {
    const int on = 1;
    setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(socket_.get(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsentBytes, sizeof kUnsentBytes);
    const auto silence = static_cast<unsigned>(std::chrono::duration_cast<std::chrono::milliseconds>(wire_.silence_).count());
    setsockopt(socket_.get(), IPPROTO_TCP, TCP_USER_TIMEOUT, &silence, sizeof silence);
    wire_.poller_.add(socket_.get(), EPOLLIN, *this);
    wire_.fresh_.push_back(this);
  }

  ~TcpConnection() override { close(); }

  void expose(std::uint32_t, const Memory&) override {}  // a stream's chunks are placed by the receiver
  void withdraw(std::uint32_t) noexcept override {}

  [[nodiscard]] bool can_post(std::uint32_t) const override { return !closed_ && turn_left_ > 0; }

  void post(const Frame& chunk, const Memory& message, bool) override {
    queued_ += chunk.length;
    turn_left_ -= std::min<std::size_t>(turn_left_, chunk.length);
    queue_.push_back({encode(chunk), message.bytes.subspan(chunk.offset, chunk.length), {}, message.id});
  }

  [[nodiscard]] bool holds(const Memory& message) const override {
    return std::any_of(queue_.begin(), queue_.end(), [&](const Out& out) { return out.memory == message.id; });
  }

  void send(const Frame& frame, std::span<const std::byte> payload) override {
    if (closed_) return;
    Out& out = queue_.emplace_back(Out{encode(frame), {}, {payload.begin(), payload.end()}, 0});
    out.payload = out.copied;  // a deque never moves what it holds
  }

  void flush() override {
    while (!closed_ && !queue_.empty()) {
      std::array<iovec, kPieces> pieces;
      msghdr message{};
      message.msg_iov = pieces.data();
      message.msg_iovlen = gather(pieces);
      const ssize_t put = sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (put < 0 && errno == EINTR) continue;
      if (put < 0 && errno != EAGAIN) {
        // The sink may be the caller, so it is told later, from the engine's loop.
        broken_ = error_text(errno);
        wire_.broken_.push_back(this);
        return;
      }
      if (put < 0) break;
      written(static_cast<std::size_t>(put));
    }
    want_writable(!queue_.empty() || turn_left_ == 0);
  }

  void close() noexcept override {
    if (std::exchange(closed_, true)) return;
    wire_.poller_.remove(socket_.get());
    std::erase(wire_.fresh_, this);
    std::erase(wire_.broken_, this);
    queue_.clear();
    queued_ = 0;
  }

  [[nodiscard]] Clock::time_point heard() override {
    // While a chunk is awaited as a whole, on a slow link for seconds, only the kernel knows that bytes of it come.
    int waiting = 0;
    if (wakes_for_ > 1 && ioctl(socket_.get(), FIONREAD, &waiting) == 0 && waiting != std::exchange(waiting_, waiting)) {
      heard_ = Clock::now();
    }
    return heard_;
  }

  [[nodiscard]] Pace pace() override { return pace_.read(socket_.get()); }

  [[nodiscard]] std::uint64_t ahead() const override {
    int unacknowledged = 0;
    if (ioctl(socket_.get(), SIOCOUTQ, &unacknowledged) != 0) return 0;
    const std::uint64_t posted = queued_ + static_cast<std::uint64_t>(unacknowledged), held = TcpPace::held(socket_.get());
    return posted - std::min(posted, held);
  }

  void ready(std::uint32_t events) override {
    if ((events & EPOLLOUT) != 0) {
      flush();
      if (!closed_ && queued_ == 0) {
        turn_left_ = kTurnBytes;
        sink_.writable(*this);
        if (!closed_) want_writable(!queue_.empty() || turn_left_ == 0);
      }
    }
    if (!closed_ && (events & ~static_cast<std::uint32_t>(EPOLLOUT)) != 0) read();
  }

  void tell_established() { sink_.established(*this); }
  void tell_broken() { fail(broken_); }

 private:
  struct Out {
    FrameBytes header;
    std::span<const std::byte> payload;
    std::vector<std::byte> copied;
    std::uint64_t memory;
  };

  std::size_t gather(std::array<iovec, kPieces>& pieces) const {
    std::size_t count = 0, skip = begun_;
    const auto add = [&](std::span<const std::byte> bytes) {
      const std::size_t skipped = std::min(skip, bytes.size());
      skip -= skipped;
      if (skipped == bytes.size()) return;
      pieces[count++] = {const_cast<std::byte*>(bytes.data() + skipped), bytes.size() - skipped};
    };
    for (const Out& out : queue_) {
      if (count + 2 > kPieces) break;
      add(out.header);
      add(out.payload);
    }
    return count;
  }

  void written(std::size_t bytes) {
    begun_ += bytes;
    while (!queue_.empty() && begun_ >= kFrameBytes + queue_.front().payload.size()) {
      const Out& out = queue_.front();
      begun_ -= kFrameBytes + out.payload.size();
      if (out.memory != 0) queued_ -= out.payload.size();
      queue_.pop_front();
    }
  }

  void want_writable(bool wanted) {
    if (closed_ || wanted == std::exchange(wants_writable_, wanted)) return;
    wire_.poller_.modify(socket_.get(), wanted ? EPOLLIN | EPOLLOUT : EPOLLIN, *this);
  }

  void read() {
    const auto before = total_read_;
    is_drained_ = false;
    while (!closed_) {
      has_budget_ = total_read_ - before < kReadBudget;
      // Staged bytes are worked off in any case: epoll would not report them again.
      if (!has_budget_ && staged_begin_ == staged_end_ && !(in_payload_ && done_ == frame_.length)) break;
      if (!in_payload_) {
        if (!read_header()) break;
      } else if (done_ < frame_.length) {
        if (!read_payload()) break;
      } else {
        in_payload_ = false;
        if (frame_.kind == FrameKind::kChunk) {
          sink_.chunk(*this, frame_);
        } else {
          sink_.control(*this, frame_, std::span(control_).first(frame_.length));
        }
      }
    }
    has_budget_ = true;
    if (!closed_) wake_for(in_payload_ && !is_dropped_ ? frame_.length - done_ : 1);
    if (total_read_ != before) heard_ = Clock::now();
  }

  // Behind a long chunk there is likely another, whose bytes belong into its slot: no more than its header is read ahead.
  [[nodiscard]] std::size_t staged_at_most() const { return frame_.length > kStagingBytes ? kFrameBytes : kStagingBytes; }

  bool read_header() {
    if (staged_end_ - staged_begin_ < kFrameBytes) {
      std::memmove(staging_.data(), staging_.data() + staged_begin_, staged_end_ - staged_begin_);
      staged_end_ -= std::exchange(staged_begin_, 0);
      const iovec rest = {staging_.data() + staged_end_, staged_at_most() - staged_end_};
      const std::size_t got = receive(std::span(&rest, 1));
      staged_end_ += got;
      return got > 0;
    }
    std::string reason;
    if (!decode(std::span<const std::byte, kFrameBytes>(staging_.data() + staged_begin_, kFrameBytes), frame_, reason)) {
      fail(reason);
      return false;
    }
    staged_begin_ += kFrameBytes;
    in_payload_ = true;
    is_dropped_ = false;
    done_ = 0;
    return true;
  }

  bool read_payload() {
    std::span<std::byte> place = std::span(control_).first(std::min<std::size_t>(frame_.length, control_.size()));
    if (frame_.kind == FrameKind::kChunk) {
      std::string refusal;
      place = is_dropped_ ? std::span<std::byte>() : sink_.place(frame_, refusal);
      if (!refusal.empty()) {
        fail(refusal);
        return false;
      }
      is_dropped_ = place.empty();
    }
    const std::size_t missing = frame_.length - done_;
    if (const std::size_t staged = std::min(missing, staged_end_ - staged_begin_); staged > 0) {
      if (!is_dropped_) std::memcpy(place.data() + done_, staging_.data() + staged_begin_, staged);
      staged_begin_ += staged;
      done_ += staged;
      return true;
    }
    // The next frame's header comes with the same call.
    staged_begin_ = staged_end_ = 0;
    const std::span<std::byte> into =
        is_dropped_ ? std::span(wire_.scratch_).first(std::min(missing, kScratchBytes)) : place.subspan(done_);
    const std::array<iovec, 2> pieces = {iovec{into.data(), into.size()}, iovec{staging_.data(), staged_at_most()}};
    const std::size_t got = receive(std::span(pieces).first(into.size() == missing && has_budget_ ? 2 : 1));
    done_ += std::min(got, into.size());
    staged_end_ = got - std::min(got, into.size());
    return got > 0;
  }

  // Let the kernel wake this thread not for every packet, but once `bytes` have come, or as many as the kernel keeps.
  void wake_for(std::size_t bytes) {
    const int wanted = static_cast<int>(std::max<std::size_t>(bytes, 1));
    if (wanted != std::exchange(wakes_for_, wanted)) setsockopt(socket_.get(), SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted);
  }

  // Returns the bytes read; 0 if there are none now or the connection failed.
  std::size_t receive(std::span<const iovec> pieces) {
    if (is_drained_) return 0;
    const ssize_t got = readv(socket_.get(), pieces.data(), static_cast<int>(pieces.size()));
    if (got > 0) {
      total_read_ += static_cast<std::size_t>(got);
      std::size_t asked = 0;
      for (const iovec& piece : pieces) asked += piece.iov_len;
      // epoll reports bytes that have come since. That is cheaper than asking, as there are mostly none.
      is_drained_ = static_cast<std::size_t>(got) < asked;
      return static_cast<std::size_t>(got);
    }
    if (got == 0) {
      fail(std::string(kPeerEnded));
    } else if (errno != EAGAIN && errno != EINTR) {
      fail(error_text(errno));
    }
    return 0;
  }

  void fail(const std::string& reason) {
    if (closed_) return;
    close();
    sink_.failed(*this, reason);
  }

  TcpWire& wire_;
  Descriptor socket_;
  Sink& sink_;
  bool closed_ = false;
  std::string broken_;

  std::deque<Out> queue_;
  std::size_t begun_ = 0;   // bytes of the first that are written
  std::size_t queued_ = 0;  // bytes of chunks in the queue
  std::size_t turn_left_ = kTurnBytes;
  bool wants_writable_ = false;

  std::array<std::byte, kStagingBytes> staging_;
  std::size_t staged_begin_ = 0, staged_end_ = 0;
  Frame frame_;
  bool in_payload_ = false;
  bool has_budget_ = true;
  int wakes_for_ = 1;        // bytes
  int waiting_ = 0;          // bytes in the kernel when heard() was called last
  bool is_drained_ = false;  // the last read found less than was asked for
  bool is_dropped_ = false;
  std::size_t done_ = 0;
  std::array<std::byte, kHeadBytes> control_{};
  std::size_t total_read_ = 0;
  Clock::time_point heard_ = Clock::now();
  TcpPace pace_;
};

TcpWire::TcpWire(std::string local, Poller& poller, Clock::duration silence)
    : local_(std::move(local)), poller_(poller), silence_(silence), scratch_(kScratchBytes) {}

TcpWire::~TcpWire() = default;

std::uint32_t TcpWire::chunk_bytes() const { return kChunkBytes; }

std::unique_ptr<Connection> TcpWire::adopt(int descriptor, const Address&, bool, Sink& sink) {
  return std::make_unique<TcpConnection>(*this, Descriptor(descriptor), sink);
}

bool TcpWire::progress() {
  if (fresh_.empty() && broken_.empty()) return false;
  for (TcpConnection* const connection : std::exchange(fresh_, {})) connection->tell_established();
  while (!broken_.empty()) {
    TcpConnection* const connection = broken_.back();
    broken_.pop_back();
    connection->tell_broken();
  }
  return true;
}

}  // namespace adaptra::delegate
