#include "delegate/handshake.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <system_error>
#include <utility>

#include "delegate/little_endian.h"

namespace adaptra::delegate {
namespace {

constexpr std::string_view kMagic = "adhs";
constexpr std::byte kVersion{1};
constexpr std::size_t kNonceAt = 24;

}  // namespace

Nonce make_nonce() {
  Nonce nonce{};
  std::size_t filled = 0;
  while (filled < nonce.size()) {
    const ssize_t got = getrandom(nonce.data() + filled, nonce.size() - filled, 0);
    if (got < 0 && errno != EINTR) throw std::system_error(errno, std::generic_category(), "getrandom");
    if (got > 0) filled += static_cast<std::size_t>(got);
  }
  return nonce;
}

Handshake Handshake::open(const Secret& secret, const Address& address, const Nonce& nonce) {
  Handshake made(secret, Part::kChallenge);
  made.address_ = address;
  std::span<std::byte> hello = made.hello_;
  std::memcpy(hello.data(), kMagic.data(), kMagic.size());
  hello[4] = kVersion;
  hello[5] = static_cast<std::byte>(address.is_backward ? 1 : 0);
  put(hello, 8, 4, address.source);
  put(hello, 12, 4, address.destination);
  put(hello, 16, 4, address.path);
  put(hello, 20, 4, address.index);
  std::copy(nonce.begin(), nonce.end(), hello.begin() + kNonceAt);
  made.say(hello);
  return made;
}

Handshake Handshake::accept(const Secret& secret, const Nonce& nonce) {
  Handshake made(secret, Part::kHello);
  made.challenge_ = nonce;
  return made;
}

std::vector<std::byte> Handshake::output() { return std::exchange(output_, {}); }

std::size_t Handshake::wanted() const {
  switch (next_) {
    case Part::kHello: return kHelloBytes;
    case Part::kChallenge: return sizeof(Nonce);
    case Part::kProof:
    case Part::kConfirmation: return sizeof(Digest);
  }
  return 0;
}

Handshake::State Handshake::receive(std::span<const std::byte> part) {
  switch (next_) {
    case Part::kHello:
      std::copy(part.begin(), part.end(), hello_.begin());
      if (std::memcmp(hello_.data(), kMagic.data(), kMagic.size()) != 0 || hello_[4] != kVersion) {
        return refuse("sent bytes that are no greeting of version 1");
      }
      address_ = Address{get32(hello_, 8), get32(hello_, 12), hello_[5] != std::byte{}, get32(hello_, 16), get32(hello_, 20)};
      say(challenge_);
      next_ = Part::kProof;
      return State::kTalking;
    case Part::kChallenge:
      std::copy(part.begin(), part.end(), challenge_.begin());
      say(proof("opens"));
      next_ = Part::kConfirmation;
      return State::kTalking;
    case Part::kProof:
    case Part::kConfirmation: {
      Digest given{};
      std::copy(part.begin(), part.end(), given.begin());
      const bool accepts = next_ == Part::kProof;
      if (!equal_in_constant_time(given, proof(accepts ? "opens" : "accepts"))) {
        return refuse("does not know this job's secret");
      }
      if (accepts) say(proof("accepts"));
      return State::kDone;
    }
  }
  return State::kRefused;
}

Digest Handshake::proof(const char* role) const {
  std::vector<std::byte> told;
  const auto name = std::as_bytes(std::span(role, std::strlen(role)));
  told.insert(told.end(), name.begin(), name.end());
  told.insert(told.end(), hello_.begin(), hello_.end());
  told.insert(told.end(), challenge_.begin(), challenge_.end());
  return hmac_sha256(secret_, told);
}

Handshake::State Handshake::refuse(std::string reason) {
  reason_ = std::move(reason);
  return State::kRefused;
}

}  // namespace adaptra::delegate
