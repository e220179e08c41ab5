#include "delegate/security/handshake.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <system_error>
#include <utility>

#include "delegate/system/little_endian.h"

namespace adaptra::delegate {
namespace {

constexpr std::string_view kMagic = "adhs";
constexpr unsigned kVersion = 3;
constexpr std::size_t kNonceAt = 24;
// Both have one length, so that the fields behind them are in the same place.
constexpr std::string_view kOpener = "adaptra opener 3  ", kAcceptor = "adaptra acceptor 3";
static_assert(kOpener.size() == kAcceptor.size());

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

Handshake Handshake::open(const Credentials& own, const Address& address, const Nonce& nonce) {
  Handshake made(own, Part::kChallenge);
  made.address_ = address;
  std::span<std::byte> hello = made.hello_;
  std::memcpy(hello.data(), kMagic.data(), kMagic.size());
  put(hello, 4, 1, kVersion);
  put(hello, 5, 1, static_cast<std::uint64_t>(address.channel));
  put(hello, 6, 1, address.source == own.rank ? 1 : 0);
  put(hello, 8, 4, address.source);
  put(hello, 12, 4, address.destination);
  put(hello, 16, 4, address.path);
  put(hello, 20, 4, address.index);
  std::copy(nonce.begin(), nonce.end(), hello.begin() + kNonceAt);
  made.append_output(hello);
  return made;
}

Handshake Handshake::accept(const Credentials& own, const Nonce& nonce) {
  Handshake made(own, Part::kHello);
  made.challenge_ = nonce;
  return made;
}

std::span<const std::byte, sizeof(Nonce)> Handshake::nonce() const {
  return std::span(hello_).subspan<kNonceAt, sizeof(Nonce)>();
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
    case Part::kHello: std::copy(part.begin(), part.end(), hello_.begin()); return greeted();
    case Part::kChallenge:
      std::copy(part.begin(), part.end(), challenge_.begin());
      if (std::equal(challenge_.begin(), challenge_.end(), nonce().begin())) return refuse("sent this rank's own nonce back");
      append_output(proof(true));
      next_ = Part::kConfirmation;
      return State::kTalking;
    case Part::kProof:
    case Part::kConfirmation: {
      Digest given{};
      std::copy(part.begin(), part.end(), given.begin());
      const bool accepts = next_ == Part::kProof;
      if (!equal_in_constant_time(given, proof(accepts))) return refuse("does not know this job's secret");
      if (accepts) append_output(proof(false));
      return State::kDone;
    }
  }
  return State::kRefused;
}

Handshake::State Handshake::greeted() {
  if (std::memcmp(hello_.data(), kMagic.data(), kMagic.size()) != 0 || get(hello_, 4, 1) != kVersion ||
      get(hello_, 5, 1) >= kChannelClasses.size() || get(hello_, 6, 1) > 1 || get(hello_, 7, 1) != 0) {
    return refuse("sent bytes that are no greeting of version " + std::to_string(kVersion));
  }
  address_ = Address{get32(hello_, 8), get32(hello_, 12), static_cast<ChannelClass>(get(hello_, 5, 1)), get32(hello_, 16),
                     get32(hello_, 20)};
  const bool is_opened_by_source = get(hello_, 6, 1) != 0;
  const std::uint32_t opener = is_opened_by_source ? address_.source : address_.destination;
  const std::uint32_t greeted = is_opened_by_source ? address_.destination : address_.source;
  if (greeted != own_.rank || opener == own_.rank) {
    return refuse("greeted rank " + std::to_string(greeted) + " as rank " + std::to_string(opener) + ": this is rank " +
                  std::to_string(own_.rank));
  }
  append_output(challenge_);
  next_ = Part::kProof;
  return State::kTalking;
}

// Computes the proof of one side. The hello says which rank opens; here the ranks stand once more, the prover first.
Digest Handshake::proof(bool of_opener) const {
  std::array<std::byte, 8> ranks{};
  std::vector<std::byte> told(kOpener.size() + own_.session.size() + ranks.size() + hello_.size() + challenge_.size());
  auto end = told.begin();
  const auto add = [&end](std::span<const std::byte> bytes) { end = std::copy(bytes.begin(), bytes.end(), end); };
  add(std::as_bytes(std::span(of_opener ? kOpener : kAcceptor)));
  add(own_.session);
  const bool is_opened_by_source = get(hello_, 6, 1) != 0;
  const bool is_by_source = is_opened_by_source == of_opener;
  put(ranks, 0, 4, is_by_source ? address_.source : address_.destination);
  put(ranks, 4, 4, is_by_source ? address_.destination : address_.source);
  add(ranks);
  add(hello_);
  add(challenge_);
  return hmac_sha256(own_.secret, told);
}

Handshake::State Handshake::refuse(std::string reason) {
  reason_ = std::move(reason);
  return State::kRefused;
}

}  // namespace adaptra::delegate
