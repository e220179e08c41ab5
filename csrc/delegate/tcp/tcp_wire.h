// Frames over TCP: chunks are written from the message's memory and read into the slot's, without a copy of our own between.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "delegate/wire/wire.h"

namespace adaptra::delegate {

class TcpWire : public Wire {
 public:
  // `silence`: how long the kernel may wait for the peer's acknowledgement before it gives the connection up.
  TcpWire(std::string local, Poller& poller, Clock::duration silence);
  ~TcpWire() override;

  [[nodiscard]] std::string name() const override { return "tcp " + local_; }
  [[nodiscard]] std::uint32_t chunk_bytes() const override;
  [[nodiscard]] std::unique_ptr<Connection> adopt(int descriptor, const Address& address, bool opened_here,
                                                  Sink& sink) override;
  bool progress() override;
  void forget(const Memory&) noexcept override {}  // the kernel copies: nothing is registered

 private:
  friend class TcpConnection;

  std::string local_;
  Poller& poller_;
  Clock::duration silence_;
  std::vector<class TcpConnection*> fresh_;   // adopted, their sinks not yet told
  std::vector<class TcpConnection*> broken_;  // found broken while writing, their sinks not yet told
  std::vector<std::byte> scratch_;            // where dropped payload goes
};

}  // namespace adaptra::delegate
