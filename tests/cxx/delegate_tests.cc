// Tests of the delegate's parts one by one; engine_tests.cc has them all at work.
#include <array>
#include <cstdio>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "delegate/channel/intervals.h"
#include "delegate/security/handshake.h"
#include "delegate/security/hmac.h"
#include "delegate/system/crc32c.h"
#include "delegate/wire/frame.h"

using namespace adaptra::delegate;

void test_channels();
void test_engines();
void test_giving_way();
void test_liveness();
void test_stripe_width();
void test_verbs();

namespace {

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string hex(const Digest& digest) {
  std::string text;
  for (const std::byte byte : digest) {
    std::array<char, 3> two{};
    std::snprintf(two.data(), two.size(), "%02x", std::to_integer<unsigned>(byte));
    text += two.data();
  }
  return text;
}

// RFC 3720, B.4, and one by another implementation.
void test_crc32c() {
  for (const auto sum : {&crc32c, &crc32c_portable}) {
    check(sum(bytes_of("123456789"), 0) == 0xe3069283, "the checksum of the digits");
    check(sum(std::vector<std::byte>(32), 0) == 0x8a9136aa, "the checksum of 32 zeros");
    check(sum(std::vector<std::byte>(32, std::byte{0xff}), 0) == 0x62a8ab43, "the checksum of 32 ones");
    check(sum({}, 0) == 0, "the checksum of nothing");
  }
  std::mt19937 rng(1);
  std::vector<std::byte> data(100'003);
  for (std::byte& byte : data) byte = static_cast<std::byte>(rng());
  for (const std::size_t size : {1U, 7U, 8U, 63U, 4096U, 12'287U, 12'288U, 12'289U, 24'576U, 30'001U, 100'003U}) {
    for (const std::size_t skip : {0U, 1U, 3U}) {
      const auto part = std::span(data).subspan(skip, size - std::min<std::size_t>(skip, size - 1));
      check(crc32c(part) == crc32c_portable(part), "the instruction to agree with the tables");
      const std::size_t cut = part.size() / 3;
      check(crc32c(part.subspan(cut), crc32c(part.first(cut))) == crc32c(part), "a checksum to go on where it stopped");
    }
  }
}

// FIPS 180-4's examples and RFC 4231's cases 1, 2 and 6.
void test_hmac() {
  check(hex(sha256(bytes_of("abc"))) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", "SHA-256 of abc");
  check(hex(sha256(bytes_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))) ==
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
        "SHA-256 of two blocks");
  check(
      hex(sha256(bytes_of(std::string(1'000'000, 'a')))) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0",
      "SHA-256 of a million letters");
  check(hex(hmac_sha256(bytes_of(std::string(20, '\x0b')), bytes_of("Hi There"))) ==
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7",
        "case 1");
  check(hex(hmac_sha256(bytes_of("Jefe"), bytes_of("what do ya want for nothing?"))) ==
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
        "case 2");
  check(hex(hmac_sha256(bytes_of(std::string(131, '\xaa')),
                        bytes_of("Test Using Larger Than Block-Size Key - Hash Key First"))) ==
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
        "case 6");
}

void test_frames() {
  const Frame frame{.kind = FrameKind::kChunk,
                    .slot = 7,
                    .generation = 8,
                    .sequence = 1ULL << 40,
                    .offset = 1ULL << 33,
                    .attempt = (3ULL << 32) | 5,
                    .first = 1ULL << 39,
                    .total = 1ULL << 34,
                    .length = kMaxChunkBytes,
                    .checksum = 0xdeadbeef};
  FrameBytes encoded = encode(frame);
  Frame read;
  std::string reason;
  check(decode(encoded, read, reason), "a frame to be read back");
  check(encode(read) == encoded, "every field to come back");
  for (std::size_t bit = 0; bit < 8 * kFrameBytes; ++bit) {
    FrameBytes changed = encoded;
    changed[bit / 8] ^= static_cast<std::byte>(1U << (bit % 8));
    reason.clear();
    check(!decode(changed, read, reason) && !reason.empty(), "any changed bit to be noticed, with a reason");
  }
}

void test_intervals() {
  std::mt19937 rng(2);
  for (int round = 0; round < 200; ++round) {
    Intervals intervals;
    std::vector<bool> there(64);
    for (int step = 0; step < 40; ++step) {
      const std::uint64_t begin = rng() % 63, end = begin + 1 + rng() % (64 - begin);
      const bool is_added = rng() % 3 != 0;
      is_added ? intervals.add(begin, end) : intervals.remove(begin, end);
      for (std::uint64_t k = begin; k < end; ++k) there[k] = is_added;
      for (std::uint64_t first = 0; first < 64; ++first) {
        bool all = true;
        for (std::uint64_t last = first + 1; last <= 64; ++last) {
          all = all && there[last - 1];
          check(intervals.covers(first, last) == all, "intervals to agree with a list of bits");
        }
      }
    }
  }
}

Handshake::State hear(Handshake& listener, std::span<const std::byte> told) {
  auto state = Handshake::State::kTalking;
  while (state == Handshake::State::kTalking && told.size() >= listener.wanted() && !told.empty()) {
    const std::size_t wanted = listener.wanted();
    state = listener.receive(told.first(wanted));
    told = told.subspan(wanted);
  }
  return state;
}

void test_handshake() {
  const Address address{.source = 3, .destination = 4, .channel = ChannelClass::kBulk, .path = 1, .index = 2};
  Secret secret{}, other{};
  other[31] = std::byte{1};
  for (const bool same : {true, false}) {
    Handshake opener = Handshake::open({.secret = secret, .session = {}, .rank = 4}, address, make_nonce());
    Handshake acceptor = Handshake::accept({.secret = same ? secret : other, .session = {}, .rank = 3}, make_nonce());
    check(hear(acceptor, opener.output()) == Handshake::State::kTalking, "a challenge after the greeting");
    check(hear(opener, acceptor.output()) == Handshake::State::kTalking, "a proof after the challenge");
    const auto state = hear(acceptor, opener.output());
    check(state == (same ? Handshake::State::kDone : Handshake::State::kRefused), "the proof to tell the secrets apart");
    if (!same) {
      check(acceptor.output().empty(), "a stranger to be told nothing more");
      continue;
    }
    check(hear(opener, acceptor.output()) == Handshake::State::kDone, "the acceptor to prove itself too");
    const Address& proven = acceptor.address();
    check(proven.source == 3 && proven.destination == 4 && proven.channel == ChannelClass::kBulk && proven.path == 1 &&
              proven.index == 2,
          "the proven address to be the opener's");
  }
}

void test_unknown_classes_are_refused() {
  for (const unsigned number : {0U, 1U, 2U, 3U, 4U, 255U}) {
    Handshake opener = Handshake::open({.rank = 4}, {.source = 3, .destination = 4}, make_nonce());
    Handshake acceptor = Handshake::accept({.rank = 3}, make_nonce());
    std::vector<std::byte> hello = opener.output();
    hello[5] = static_cast<std::byte>(number);
    const auto state = hear(acceptor, hello);
    const bool is_there = number < kChannelClasses.size();
    check((state == Handshake::State::kTalking) == is_there, "a class that there is not to be refused at the door");
    check(is_there || acceptor.reason() == "sent bytes that are no greeting of version 3", "the reason to be told");
  }
}

}  // namespace

int main() {
  test_crc32c();
  test_hmac();
  test_frames();
  test_intervals();
  test_handshake();
  test_unknown_classes_are_refused();
  test_stripe_width();
  test_giving_way();
  test_channels();
  test_engines();
  test_liveness();
  test_verbs();
  std::puts("all C++ tests of the delegate passed");
}
