#include "delegate/security/hmac.h"

#include <algorithm>
#include <bit>

namespace adaptra::delegate {
namespace {

constexpr std::size_t kBlock = 64;

// FIPS 180-4, 4.2.2: the first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<std::uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

class Sha256 {
 public:
  void add(std::span<const std::byte> bytes) {
    total_ += bytes.size();
    while (!bytes.empty()) {
      const std::size_t taken = std::min(bytes.size(), kBlock - filled_);
      std::copy_n(bytes.begin(), taken, block_.begin() + static_cast<std::ptrdiff_t>(filled_));
      filled_ += taken;
      bytes = bytes.subspan(taken);
      if (filled_ == kBlock) compress();
    }
  }

  [[nodiscard]] Digest finish() {
    const std::uint64_t bits = total_ * 8;
    const std::array<std::byte, 1> one = {std::byte{0x80}};
    add(one);
    constexpr std::array<std::byte, kBlock> kZeros{};
    const std::size_t padding = (kBlock + kBlock - 8 - filled_) % kBlock;
    add(std::span(kZeros).first(padding));
    std::array<std::byte, 8> length{};
    for (std::size_t k = 0; k < 8; ++k) length[k] = static_cast<std::byte>(bits >> (56 - 8 * k));
    add(length);
    Digest digest{};
    for (std::size_t k = 0; k < digest.size(); ++k) digest[k] = static_cast<std::byte>(state_[k / 4] >> (24 - 8 * (k % 4)));
    return digest;
  }

 private:
  void compress() {
    filled_ = 0;
    std::array<std::uint32_t, 64> w{};
    for (std::size_t t = 0; t < 64; ++t) w[t / 4] |= std::to_integer<std::uint32_t>(block_[t]) << (24 - 8 * (t % 4));
    for (std::size_t t = 16; t < 64; ++t) {
      const std::uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
      const std::uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
      w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (std::size_t t = 0; t < 64; ++t) {
      const std::uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const std::uint32_t first = h + sum1 + ((e & f) ^ (~e & g)) + kRound[t] + w[t];
      const std::uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const std::uint32_t second = sum0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
    }
    const std::array<std::uint32_t, 8> worked = {a, b, c, d, e, f, g, h};
    for (std::size_t k = 0; k < 8; ++k) state_[k] += worked[k];
  }

  std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::byte, kBlock> block_{};
  std::size_t filled_ = 0;
  std::uint64_t total_ = 0;
};

}  // namespace

Digest sha256(std::span<const std::byte> message) {
  Sha256 hash;
  hash.add(message);
  return hash.finish();
}

Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> message) {
  std::array<std::byte, kBlock> padded{};
  const Digest hashed = key.size() > kBlock ? sha256(key) : Digest{};
  const std::span<const std::byte> used = key.size() > kBlock ? std::span<const std::byte>(hashed) : key;
  std::copy(used.begin(), used.end(), padded.begin());
  Sha256 inner, outer;
  for (std::byte& byte : padded) byte ^= std::byte{0x36};
  inner.add(padded);
  inner.add(message);
  for (std::byte& byte : padded) byte ^= std::byte{0x36} ^ std::byte{0x5c};
  outer.add(padded);
  outer.add(inner.finish());
  return outer.finish();
}

bool equal_in_constant_time(const Digest& a, const Digest& b) noexcept {
  std::byte different{};
  for (std::size_t k = 0; k < a.size(); ++k) different |= a[k] ^ b[k];
  return different == std::byte{};
}

}  // namespace adaptra::delegate
