// The fuzz target: any bytes on a proven connection, and any from a stranger in a handshake, are taken or refused without a bad
// access. The input's first byte chooses who listens. Its second chooses whether the rest is raw or is fields of frames.
// Checksums of such frames are put right, since no fuzzer finds those.
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "delegate/channel/receive_channel.h"
#include "delegate/channel/send_channel.h"
#include "delegate/security/handshake.h"
#include "delegate/system/crc32c.h"
#include "lone_host.h"

using namespace adaptra::delegate;

namespace {

// Reads numbers off the input; zeros once it is used up.
class Reader {
 public:
  explicit Reader(std::span<const std::uint8_t> data) : data_(data) {}
  [[nodiscard]] bool is_empty() const { return data_.empty(); }
  std::uint64_t number(std::size_t size) {
    std::uint64_t value = 0;
    for (std::size_t k = 0; k < size && !data_.empty(); ++k) {
      value = value << 8 | data_.front();
      data_ = data_.subspan(1);
    }
    return value;
  }
  std::vector<std::byte> rest(std::size_t at_most) {
    const auto taken = std::as_bytes(data_.first(std::min(at_most, data_.size())));
    data_ = data_.subspan(taken.size());
    return {taken.begin(), taken.end()};
  }

 private:
  std::span<const std::uint8_t> data_;
};

std::vector<std::byte> make_frames(Reader& reader) {
  std::vector<std::byte> stream;
  while (!reader.is_empty()) {
    Frame frame;
    frame.kind = static_cast<FrameKind>(reader.number(1) % 11);
    frame.slot = static_cast<std::uint32_t>(reader.number(1));
    frame.generation = static_cast<std::uint32_t>(reader.number(1));
    frame.sequence = reader.number(1);
    frame.offset = reader.number(2);
    frame.total = reader.number(2);
    frame.length = static_cast<std::uint32_t>(reader.number(2));
    const auto payload = reader.rest(std::min<std::size_t>(frame.length, 256));
    if (payload.size() == frame.length) frame.checksum = crc32c(payload);
    const FrameBytes header = encode(frame);
    stream.insert(stream.end(), header.begin(), header.end());
    stream.insert(stream.end(), payload.begin(), payload.end());
  }
  return stream;
}

void play(Channel& channel, LoneHost& host, const std::vector<std::byte>& stream) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) != 0) return;
  const Descriptor peer(ends[1]);
  channel.connected(Descriptor(ends[0]), channel.address(), true);
  host.wire(0).progress();
  std::size_t sent = 0;
  std::vector<std::byte> drain(1U << 16);
  while (host.poller.handlers.contains(ends[0])) {
    const ssize_t put = sent < stream.size() ? send(peer.get(), stream.data() + sent, stream.size() - sent, MSG_NOSIGNAL) : 0;
    if (put <= 0) break;
    sent += static_cast<std::size_t>(put);
    host.poller.handlers[ends[0]]->ready(EPOLLIN);
    channel.flush();
    while (recv(peer.get(), drain.data(), drain.size(), 0) > 0) continue;
  }
  channel.tick(Clock::now());
  channel.fail("the input is used up");
  channel.reap();
}

void fuzz_receiver(const std::vector<std::byte>& stream) {
  LoneHost host;
  ReceiveChannel channel(host, {.source = 0, .destination = 1}, {"tcp"});
  channel.reserve(300, 2);
  channel.reserve(64, 1);
  std::vector<std::shared_ptr<Request>> requests;
  for (const std::uint64_t size : {300U, 64U, 300U}) {
    requests.push_back(std::make_shared<Request>());
    channel.post(requests.back(), size);
  }
  play(channel, host, stream);
  for (const auto& request : requests) {
    if (request->outcome() == Outcome::kDone) channel.release(request->slot());
  }
}

void fuzz_sender(const std::vector<std::byte>& stream) {
  LoneHost host;
  SendChannel channel(host, {.source = 0, .destination = 1}, {"tcp"});
  for (const std::size_t size : {300U, 64U, 300U}) {
    channel.submit(std::make_shared<Request>(), host.make_pages(size), size, Clock::now());
  }
  play(channel, host, stream);
}

void fuzz_handshake(const std::vector<std::byte>& stream, bool accepts) {
  Handshake handshake =
      accepts ? Handshake::accept(Credentials{}, Nonce{}) : Handshake::open(Credentials{}, Address{}, Nonce{});
  std::span<const std::byte> left = stream;
  while (left.size() >= handshake.wanted()) {
    const std::size_t wanted = handshake.wanted();
    if (handshake.receive(left.first(wanted)) != Handshake::State::kTalking) return;
    left = left.subspan(wanted);
    (void)handshake.output();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Reader reader(std::span(data, size));
  const std::uint64_t who = reader.number(1) % 4;
  const bool is_raw = reader.number(1) % 4 == 0 || who >= 2;
  const std::vector<std::byte> stream = is_raw ? reader.rest(size) : make_frames(reader);
  if (who == 0) fuzz_receiver(stream);
  if (who == 1) fuzz_sender(stream);
  if (who >= 2) fuzz_handshake(stream, who == 2);
  return 0;
}
