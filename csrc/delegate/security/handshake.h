// Mutual authentication: the two sides of a new connection prove to each other that they know the job's secret.
//
//   opener → acceptor   hello          56 bytes: magic, version, which connection this is, who opens it, a fresh nonce.
//   acceptor → opener   challenge      32 bytes: the acceptor's fresh nonce.
//   opener → acceptor   proof          32 bytes: HMAC(secret, "opener" + session + both ranks + hello + challenge).
//   acceptor → opener   confirmation   32 bytes: HMAC(secret, "acceptor" + session + both ranks + hello + challenge).
//
// Every part has a fixed size, so no length is believed before the proof. A stranger is told nothing but a random number. A
// recorded handshake is worthless, because the other side's nonce is another each time. A proof serves one rank, in one role,
// towards one other rank. So nobody can get a rank to make a proof that deceives that rank, or a third one. This file has the
// parts alone: connector.h moves the bytes. docs/security.md says what the handshake guards against, and what not.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "delegate/security/hmac.h"
#include "delegate/wire/wire.h"

namespace adaptra::delegate {

using Secret = std::array<std::byte, 32>;
using Nonce = std::array<std::byte, 32>;

// The credentials of a rank. All engines that join each other have the same secret and session.
struct Credentials {
  Secret secret{};
  Digest session{};
  std::uint32_t rank = 0;
};

inline constexpr std::size_t kHelloBytes = 56;

// Fresh random bytes of the system. Throws std::system_error.
[[nodiscard]] Nonce make_nonce();

class Handshake {
 public:
  enum class State { kTalking, kDone, kRefused };

  // The side that opened the connection `address`.
  static Handshake open(const Credentials& own, const Address& address, const Nonce& nonce);
  // The side that accepted some connection.
  static Handshake accept(const Credentials& own, const Nonce& nonce);

  // Bytes to be sent now; each is returned once.
  [[nodiscard]] std::vector<std::byte> output();

  // The size of the next part in bytes.
  [[nodiscard]] std::size_t wanted() const;

  // Takes the next part: exactly wanted() bytes.
  State receive(std::span<const std::byte> part);

  // The connection that the hello names; proven once the state is kDone.
  [[nodiscard]] const Address& address() const { return address_; }
  // The opener's nonce, once it is known.
  [[nodiscard]] std::span<const std::byte, sizeof(Nonce)> nonce() const;
  // The reason why it was refused.
  [[nodiscard]] const std::string& reason() const { return reason_; }

 private:
  enum class Part { kHello, kChallenge, kProof, kConfirmation };

  Handshake(const Credentials& own, Part next) : own_(own), next_(next) {}

  State greeted();
  [[nodiscard]] Digest proof(bool of_opener) const;
  State refuse(std::string reason);
  void append_output(std::span<const std::byte> bytes) { output_.insert(output_.end(), bytes.begin(), bytes.end()); }

  Credentials own_;
  Part next_;
  Address address_;
  std::array<std::byte, kHelloBytes> hello_{};
  Nonce challenge_{};
  std::vector<std::byte> output_;
  std::string reason_;
};

}  // namespace adaptra::delegate
