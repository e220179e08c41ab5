// Frames over RDMA: the source writes chunks straight into the destination's exposed slots, beside the processor of either.
//
// The queue pairs' addresses are exchanged over the authenticated TCP socket. That socket should run between the same two
// interfaces: then the kernel knows the neighbour's hardware address, and nothing waits for it.
//
// A message that is one chunk is one request, a write of its bytes. Its immediate value is the checksum of the header, which
// the destination makes up. Any other chunk is two requests: a send of its header, and a write of its bytes. The immediate
// value of the write says which header they belong to. A chunk small enough to be sent beside its header is one send. Every
// other frame is one send, too.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "delegate/system/descriptor.h"
#include "delegate/verbs/ibverbs_dl.h"
#include "delegate/wire/wire.h"

namespace adaptra::delegate {

class VerbsConnection;

// One port of one device, with one completion queue for all its connections.
class VerbsWire : public Wire {
 public:
  // Throws std::system_error: the device can't be opened, or has no room.
  VerbsWire(const Verbs& verbs, Port port, Poller& poller);
  ~VerbsWire() override;
  VerbsWire(const VerbsWire&) = delete;
  VerbsWire& operator=(const VerbsWire&) = delete;

  [[nodiscard]] std::string name() const override;
  [[nodiscard]] std::uint32_t chunk_bytes() const override;
  [[nodiscard]] std::unique_ptr<Connection> adopt(int descriptor, const Address& address, bool opened_here,
                                                  Sink& sink) override;
  bool progress() override;
  void forget(const Memory& memory) noexcept override;

 private:
  friend class VerbsConnection;

  class Listener : public Handler {
   public:
    Listener(VerbsWire& wire, void (VerbsWire::*call)()) : wire_(wire), call_(call) {}
    void ready(std::uint32_t) override { (wire_.*call_)(); }

   private:
    VerbsWire& wire_;
    void (VerbsWire::*call_)();
  };

  void completions_ready();
  // Have the next completion of any kind wake the engine, not only one that a peer marked as urgent.
  void notice_all();
  void woken();
  void device_told();
  void fail_all(const std::string& reason);

  Verbs verbs_;
  Port port_;
  Poller& poller_;
  Device device_;
  CompletionChannel channel_;
  CompletionQueue completions_;
  Listener on_completions_{*this, &VerbsWire::completions_ready};
  Listener on_wake_{*this, &VerbsWire::woken};
  Listener on_device_{*this, &VerbsWire::device_told};
  bool notices_all_ = false;
  Descriptor wake_;
  std::uint32_t next_serial_ = 0;
  std::unordered_map<std::uint32_t, VerbsConnection*> connections_;  // by the serial number that their requests carry
  std::vector<VerbsConnection*> broken_;                             // their sinks are not yet told
};

}  // namespace adaptra::delegate
