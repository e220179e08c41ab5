#include "delegate/verbs/verbs_wire.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "delegate/system/forks.h"
#include "delegate/verbs/verbs_connection.h"

namespace adaptra::delegate {
namespace {

constexpr std::uint32_t kChunkBytes = 256U << 10;
// Room in the completion queue, as far as the device has it. Connections that find none left are refused, since a queue that
// overflows is lost for all of them.
constexpr int kCompletions = 64 * kRequestsPerConnection;
constexpr int kBatch = 32;
// Completions that a peer marks as urgent wake the engine. The rest (ends of our own sends, heartbeats) is collected with them,
// or at the engine's next tick, unless somebody waits for it.
constexpr int kOnlyUrgent = 1;

std::system_error failure(const std::string& what, int error = errno) {
  return std::system_error(error, std::generic_category(), what);
}

void make_non_blocking(int descriptor) {
  const int flags = fcntl(descriptor, F_GETFL);
  if (flags < 0 || fcntl(descriptor, F_SETFL, flags | O_NONBLOCK) < 0) throw failure("an RDMA device's descriptor");
}

}  // namespace

VerbsWire::VerbsWire(const Verbs& verbs, Port port, Poller& poller)
    : verbs_(verbs),
      port_(std::move(port)),
      poller_(poller),
      device_(open_device(verbs, port_.device)),
      channel_(verbs.create_comp_channel(device_.get()), verbs.destroy_comp_channel),
      completions_(nullptr, verbs.destroy_cq) {
  if (channel_ == nullptr) throw failure(name() + ": completion channel");
  ibv_device_attr limits{};
  if (const int error = verbs_.query_device(device_.get(), &limits); error != 0) throw failure(name(), error);
  completions_.reset(verbs_.create_cq(device_.get(), std::min(kCompletions, limits.max_cqe), nullptr, channel_.get(), 0));
  if (completions_ == nullptr) throw failure(name() + ": completion queue");
  make_non_blocking(channel_->fd);
  make_non_blocking(device_->async_fd);
  if (const int error = device_->ops.req_notify_cq(completions_.get(), kOnlyUrgent); error != 0)
    throw failure(name() + ": completion queue", error);
  poller_.add(channel_->fd, EPOLLIN, on_completions_);
  poller_.add(device_->async_fd, EPOLLIN, on_device_);
  wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (wake_.get() < 0) throw failure(name() + ": eventfd");
  poller_.add(wake_.get(), EPOLLIN, on_wake_);
  for (const int descriptor : {device_->cmd_fd, device_->async_fd, channel_->fd}) forks::hold(descriptor);
}

VerbsWire::~VerbsWire() {
  for (const int descriptor : {device_->cmd_fd, device_->async_fd, channel_->fd}) forks::forget(descriptor);
  poller_.remove(channel_->fd);
  poller_.remove(device_->async_fd);
  poller_.remove(wake_.get());
}

std::string VerbsWire::name() const { return "verbs " + port_.device + " port " + std::to_string(port_.number); }

std::uint32_t VerbsWire::chunk_bytes() const { return kChunkBytes; }

std::unique_ptr<Connection> VerbsWire::adopt(int descriptor, const Address& address, bool, Sink& sink) {
  Descriptor socket(descriptor);
  const auto room = static_cast<std::size_t>(completions_->cqe / kRequestsPerConnection);
  if (connections_.size() >= room) throw failure(name() + ": too many connections", ENOSPC);
  const std::uint32_t serial = next_serial_++;
  auto connection = std::make_unique<VerbsConnection>(*this, std::move(socket), serial, address.channel, sink);
  connections_.emplace(serial, connection.get());
  return connection;
}

bool VerbsWire::progress() {
  bool any = !broken_.empty();
  while (!broken_.empty()) {
    VerbsConnection* const connection = broken_.back();
    broken_.pop_back();
    connection->tell_broken();
  }
  std::array<ibv_wc, kBatch> batch;
  std::vector<std::uint32_t> touched;
  int count = 0;
  while ((count = device_->ops.poll_cq(completions_.get(), kBatch, batch.data())) > 0) {
    any = true;
    for (const ibv_wc& completion : std::span(batch).first(static_cast<std::size_t>(count))) {
      const auto serial = static_cast<std::uint32_t>(completion.wr_id >> 32);
      const auto found = connections_.find(serial);
      if (found == connections_.end()) continue;  // closed since
      if (touched.empty() || touched.back() != serial) touched.push_back(serial);
      found->second->completed(completion);
    }
  }
  if (count < 0) fail_all("its completion queue is lost");
  for (const std::uint32_t serial : touched) {
    if (const auto found = connections_.find(serial); found != connections_.end()) found->second->resume();
  }
  return any;
}

void VerbsWire::forget(const Memory& memory) noexcept {
  for (const auto& [serial, connection] : connections_) connection->forget(memory);
}

void VerbsWire::completions_ready() {
  ibv_cq* queue = nullptr;
  void* context = nullptr;
  unsigned int events = 0;
  while (verbs_.get_cq_event(channel_.get(), &queue, &context) == 0) ++events;
  if (events > 0) verbs_.ack_cq_events(completions_.get(), events);
  notices_all_ = false;
  // Armed before the queue is emptied, so that any later completion wakes the engine.
  if (const int error = device_->ops.req_notify_cq(completions_.get(), kOnlyUrgent); error != 0)
    fail_all("its completion queue can't be armed");
  progress();
}

void VerbsWire::notice_all() {
  if (std::exchange(notices_all_, true)) return;
  if (const int error = device_->ops.req_notify_cq(completions_.get(), 0); error != 0) notices_all_ = false;
  // The queue may hold completions already, which wake nobody: have the engine look for them once.
  const std::uint64_t one = 1;
  if (write(wake_.get(), &one, sizeof one) != sizeof one) notices_all_ = false;
}

void VerbsWire::woken() {
  std::uint64_t count = 0;
  if (read(wake_.get(), &count, sizeof count) == sizeof count) progress();
}

void VerbsWire::device_told() {
  ibv_async_event event{};
  while (verbs_.get_async_event(device_.get(), &event) == 0) {
    const ibv_event_type type = event.event_type;
    const bool is_of_pair = type == IBV_EVENT_QP_FATAL || type == IBV_EVENT_QP_REQ_ERR || type == IBV_EVENT_QP_ACCESS_ERR;
    const ibv_qp* const pair = is_of_pair ? event.element.qp : nullptr;
    verbs_.ack_async_event(&event);
    const std::string text = verbs_.event_type_str(type);
    if (type == IBV_EVENT_DEVICE_FATAL || type == IBV_EVENT_CQ_ERR) {
      fail_all(text);
    } else if (is_of_pair) {
      const auto found = std::find_if(connections_.begin(), connections_.end(),
                                      [pair](const auto& entry) { return entry.second->is_pair(pair); });
      if (found != connections_.end()) found->second->fail(text);
    } else if (const std::string state = port_state(verbs_, *device_, port_.number); state != "active") {
      // The state is asked for: the event may be late, and the port up again.
      fail_all("its port is " + state);
    }
  }
}

void VerbsWire::fail_all(const std::string& reason) {
  std::vector<std::uint32_t> serials;
  for (const auto& [serial, connection] : connections_) serials.push_back(serial);
  for (const std::uint32_t serial : serials) {
    if (const auto found = connections_.find(serial); found != connections_.end()) found->second->fail(reason);
  }
}

}  // namespace adaptra::delegate
