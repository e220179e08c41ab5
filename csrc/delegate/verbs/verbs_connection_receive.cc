// The receiving half of a verbs connection: completions, and the frames that arrive with them.
#include <arpa/inet.h>

#include <cstring>
#include <utility>

#include "delegate/system/sockets.h"
#include "delegate/verbs/verbs_connection.h"

namespace adaptra::delegate {
namespace {

constexpr std::uint32_t kCreditsAtOnce = 64;
constexpr std::size_t kMostSlots = 65536;

}  // namespace

void VerbsConnection::post_receive(std::uint32_t cell) {
  ibv_sge piece = {reinterpret_cast<std::uintptr_t>(cells_.memory().bytes.data() + cell * kReceiveCellBytes),
                   static_cast<std::uint32_t>(kReceiveCellBytes), cells_region_->lkey};
  ibv_recv_wr request{};
  request.wr_id = request_id(kReceiveBit | cell);
  request.sg_list = &piece;
  request.num_sge = 1;
  ibv_recv_wr* refused = nullptr;
  if (const int error = pair_->context->ops.post_recv(pair_.get(), &request, &refused); error != 0) {
    break_later("posting a receive: " + error_text(error));
  }
}

void VerbsConnection::completed(const ibv_wc& completion) {
  if (closed_) return;
  if (completion.status != IBV_WC_SUCCESS) {
    return fail(std::string(wire_.verbs_.wc_status_str(completion.status)) + " (completion status " +
                std::to_string(completion.status) + ", vendor's " + std::to_string(completion.vendor_err) + ")");
  }
  const auto number = static_cast<std::uint32_t>(completion.wr_id);
  if ((number & kReceiveBit) != 0) {
    was_heard_ = true;
    // Anything that the peer sends shows that it is ready, even if the word on its socket is still on the way.
    if (!std::exchange(established_, true)) sink_.established(*this);
    if (!closed_) received(completion);
    if (!closed_) post_receive(number & kNumbers);
    return;
  }
  const std::uint32_t ended = ((number - first_posted_) & kNumbers) + 1;
  for (std::uint32_t k = 0; k < ended && !posted_.empty(); ++k) {
    queued_bytes_ -= posted_.front().bytes;
    posted_.pop_front();
  }
  first_posted_ = (number + 1) & kNumbers;
  has_room_ = true;
}

void VerbsConnection::resume() {
  if (closed_) return;
  flush();
  return_credits();
  if (std::exchange(has_room_, false) && !closed_ && established_) sink_.writable(*this);
}

void VerbsConnection::return_credits() {
  if (consumed_ < kCreditsAtOnce || posted_.size() >= kSends || closed_) return;
  ibv_send_wr request{};
  request.wr_id = request_id(next_request_);
  request.opcode = IBV_WR_SEND_WITH_IMM;
  request.send_flags = IBV_SEND_SIGNALED | IBV_SEND_SOLICITED;
  request.imm_data = htonl(std::exchange(consumed_, 0));
  next_request_ = (next_request_ + 1) & kNumbers;
  posted_.push_back({});
  ibv_send_wr* refused = nullptr;
  if (const int error = pair_->context->ops.post_send(pair_.get(), &request, &refused); error != 0) {
    break_later("returning credits: " + error_text(error));
  }
}

void VerbsConnection::received(const ibv_wc& completion) {
  const bool has_number = (completion.wc_flags & IBV_WC_WITH_IMM) != 0;
  if (completion.opcode == IBV_WC_RECV && has_number) {
    const std::uint32_t credits = ntohl(completion.imm_data);
    if (credits > kReceives - credits_) return fail("its peer returned more credits than it had been given");
    credits_ += credits;
    has_room_ = true;
    return;
  }
  ++consumed_;
  if (completion.opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
    received_chunk(completion.byte_len, ntohl(completion.imm_data));
  } else {
    const std::size_t cell = static_cast<std::uint32_t>(completion.wr_id) & kNumbers;
    received_frame(std::span<const std::byte>(cells_.memory().bytes).subspan(cell * kReceiveCellBytes, completion.byte_len));
  }
}

void VerbsConnection::received_frame(std::span<const std::byte> bytes) {
  Frame frame;
  std::string reason;
  if (bytes.size() < kFrameBytes) return fail("its peer sent less than a frame");
  if (!decode(bytes.first<kFrameBytes>(), frame, reason)) return fail(reason);
  const std::span<const std::byte> payload = bytes.subspan(kFrameBytes);
  if (frame.kind == FrameKind::kChunk && payload.empty()) {
    announced_.push_back(frame);
  } else if (frame.length != payload.size()) {
    fail("a frame's payload has " + std::to_string(payload.size()) + " bytes: its header says " + std::to_string(frame.length));
  } else if (frame.kind == FrameKind::kChunk) {
    received_beside(frame, payload);
  } else if (frame.kind == FrameKind::kExpose) {
    received_exposure(frame, payload);
  } else {
    sink_.control(*this, frame, payload);
  }
}

void VerbsConnection::received_exposure(const Frame& frame, std::span<const std::byte> payload) {
  if (payload.size() != kExposureBytes || (remote_.size() >= kMostSlots && !remote_.contains(frame.slot))) {
    return fail("its peer exposed a slot wrongly");
  }
  Remote remote;
  remote.bytes = frame.total;
  for (std::size_t k = 0; k < 8; ++k) remote.address |= std::to_integer<std::uint64_t>(payload[k]) << (8 * k);
  for (std::size_t k = 0; k < 4; ++k) remote.key |= std::to_integer<std::uint32_t>(payload[8 + k]) << (8 * k);
  remote_.insert_or_assign(frame.slot, remote);
  has_room_ = true;
}

void VerbsConnection::received_beside(const Frame& frame, std::span<const std::byte> payload) {
  std::string refusal;
  const std::span<std::byte> place = sink_.place(frame, refusal);
  if (!refusal.empty()) return fail(refusal);
  if (!place.empty()) std::memcpy(place.data(), payload.data(), payload.size());
  sink_.chunk(*this, frame);
}

void VerbsConnection::received_chunk(std::uint32_t bytes, std::uint32_t number) {
  if (announced_.empty()) return sink_.bare_message(*this, bytes, number);
  if (number != chunks_received_++) return fail("its peer wrote a chunk that it had not announced");
  const Frame frame = announced_.front();
  announced_.pop_front();
  if (bytes != frame.length) {
    return fail("a chunk has " + std::to_string(bytes) + " bytes: its header says " + std::to_string(frame.length));
  }
  std::string refusal;
  const std::span<std::byte> place = sink_.place(frame, refusal);
  if (!refusal.empty()) return fail(refusal);
  // A repeated chunk has an empty place; its bytes are those that the slot has already.
  const auto exposed = exposed_.find(frame.slot);
  if (!place.empty() && (exposed == exposed_.end() || exposed->second.begin + frame.offset != place.data())) {
    return fail("a chunk was written to a slot that is not exposed here");
  }
  sink_.chunk(*this, frame);
}

}  // namespace adaptra::delegate
