#include "delegate/system/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace adaptra::delegate {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // bits reversed

using Table = std::array<std::uint32_t, 256>;

// tables[k][b]: the effect of byte b followed by k zero bytes, so that eight bytes are one step.
constexpr std::array<Table, 8> make_tables() {
  std::array<Table, 8> tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < tables.size(); ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr std::array<Table, 8> kTables = make_tables();

std::uint64_t load(const std::byte* from) noexcept {
  std::uint64_t value = 0;
  std::memcpy(&value, from, sizeof value);
  return value;
}

#if defined(__x86_64__)

// The instruction takes three cycles, but one can start in each. So three stretches are summed at a time and then joined.
// Joining moves the sum of a stretch over the bytes behind it. That is a linear map of its 32 bits, kept as four tables.
constexpr std::size_t kStretch = 4096;

using Map = std::array<std::uint32_t, 32>;

constexpr std::uint32_t apply(const Map& map, std::uint32_t value) {
  std::uint32_t sum = 0;
  for (std::size_t bit = 0; bit < 32; ++bit) sum ^= ((value >> bit) & 1) != 0 ? map[bit] : 0;
  return sum;
}

constexpr Map one_zero_byte() {
  Map map{};
  for (std::size_t bit = 0; bit < 32; ++bit) {
    const std::uint32_t value = 1U << bit;
    map[bit] = (value >> 8) ^ kTables[0][value & 0xff];
  }
  return map;
}

constexpr std::array<Table, 4> make_shift(std::size_t bytes) {
  Map map = one_zero_byte();
  for (std::size_t done = 1; done < bytes; done *= 2) {
    Map twice{};
    for (std::size_t bit = 0; bit < 32; ++bit) twice[bit] = apply(map, map[bit]);
    map = twice;
  }
  std::array<Table, 4> tables{};
  for (std::size_t k = 0; k < 4; ++k) {
    for (std::uint32_t byte = 0; byte < 256; ++byte) tables[k][byte] = apply(map, byte << (8 * k));
  }
  return tables;
}

static_assert((kStretch & (kStretch - 1)) == 0, "the map is made by doubling");
constexpr std::array<Table, 4> kShift = make_shift(kStretch);

std::uint32_t shifted(std::uint32_t crc) noexcept {
  return kShift[0][crc & 0xff] ^ kShift[1][(crc >> 8) & 0xff] ^ kShift[2][(crc >> 16) & 0xff] ^ kShift[3][crc >> 24];
}

[[gnu::target("sse4.2")]] std::uint32_t crc32c_sse42(std::span<const std::byte> bytes, std::uint32_t before) noexcept {
  std::uint64_t crc = ~before;
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= 3 * kStretch; left -= 3 * kStretch, at += 3 * kStretch) {
    std::uint64_t second = 0, third = 0;
    for (std::size_t k = 0; k < kStretch; k += 8) {
      crc = _mm_crc32_u64(crc, load(at + k));
      second = _mm_crc32_u64(second, load(at + kStretch + k));
      third = _mm_crc32_u64(third, load(at + 2 * kStretch + k));
    }
    crc = shifted(static_cast<std::uint32_t>(crc)) ^ second;
    crc = shifted(static_cast<std::uint32_t>(crc)) ^ third;
  }
  for (; left >= 8; left -= 8, at += 8) crc = _mm_crc32_u64(crc, load(at));
  auto last = static_cast<std::uint32_t>(crc);
  for (; left > 0; --left, ++at) last = _mm_crc32_u8(last, std::to_integer<std::uint8_t>(*at));
  return ~last;
}

// Folding: 128 bits that stand `distance` bits ahead of others may be multiplied by powers of x modulo the polynomial and added
// to those. Sixteen such parts are kept in four registers of 512 bits. The checksum of the last 128 bits is that of everything.
// See Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", 2009.
constexpr std::uint64_t power_of_x(std::size_t exponent) {
  std::uint32_t reversed = 0x80000000;  // the polynomial 1, bits reversed
  for (std::size_t k = 0; k < exponent; ++k) reversed = (reversed >> 1) ^ ((reversed & 1) != 0 ? kPolynomial : 0);
  return std::uint64_t{reversed} << 1;
}

struct Folding {
  std::int64_t low;   // for the earlier 64 bits
  std::int64_t high;  // for the later ones
};

constexpr Folding folding(std::size_t distance) {
  return {static_cast<std::int64_t>(power_of_x(distance + 32)), static_cast<std::int64_t>(power_of_x(distance - 32))};
}

constexpr Folding kOverOne = folding(128), kOverFour = folding(512), kOverSixteen = folding(2048);
constexpr std::size_t kWide = 256;  // bytes in four registers

// Bytes fetched ahead. A message to be sent is in no near cache, and the processor by itself fetches ahead only to the end of a
// page. From this far ahead its bytes are there in time. The checksum and the kernel's copy after it then take little longer
// than a copy alone.
constexpr std::size_t kAhead = 2048;

[[gnu::target("avx512f,vpclmulqdq")]] __m512i folded(__m512i ahead, const Folding& over, __m512i behind) noexcept {
  const __m512i factors = _mm512_set_epi64(over.high, over.low, over.high, over.low, over.high, over.low, over.high, over.low);
  const __m512i low = _mm512_clmulepi64_epi128(ahead, factors, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(ahead, factors, 0x11);
  return _mm512_ternarylogic_epi64(low, high, behind, 0x96);  // the sum of three
}

[[gnu::target("avx512f,vpclmulqdq,pclmul,sse4.2")]] std::uint32_t crc32c_wide(std::span<const std::byte> bytes,
                                                                              std::uint32_t before) noexcept {
  if (bytes.size() < 2 * kWide) return crc32c_sse42(bytes, before);
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  __m512i sums[4];  // no std::array: its template argument would lose the alignment
  for (std::size_t k = 0; k < 4; ++k) sums[k] = _mm512_loadu_si512(at + 64 * k);
  const auto first = static_cast<std::int64_t>(std::uint64_t{~before});
  sums[0] = _mm512_xor_si512(sums[0], _mm512_set_epi64(0, 0, 0, 0, 0, 0, 0, first));
  for (at += kWide, left -= kWide; left >= kWide; at += kWide, left -= kWide) {
    for (std::size_t k = 0; k < 4; ++k) {
      _mm_prefetch(reinterpret_cast<const char*>(at) + kAhead + 64 * k, _MM_HINT_T0);  // no address is an error
      sums[k] = folded(sums[k], kOverSixteen, _mm512_loadu_si512(at + 64 * k));
    }
  }
  for (std::size_t k = 1; k < 4; ++k) sums[k] = folded(sums[k - 1], kOverFour, sums[k]);
  alignas(64) std::array<std::uint64_t, 8> parts;
  _mm512_store_si512(parts.data(), sums[3]);
  const __m128i factors = _mm_set_epi64x(kOverOne.high, kOverOne.low);
  __m128i sum = _mm_load_si128(reinterpret_cast<const __m128i*>(parts.data()));
  for (std::size_t k = 2; k < 8; k += 2) {
    const __m128i behind = _mm_load_si128(reinterpret_cast<const __m128i*>(parts.data() + k));
    sum = _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(sum, factors, 0x00), _mm_clmulepi64_si128(sum, factors, 0x11)),
                        behind);
  }
  std::uint64_t crc = _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_extract_epi64(sum, 0)));
  crc = _mm_crc32_u64(crc, static_cast<std::uint64_t>(_mm_extract_epi64(sum, 1)));
  return crc32c_sse42({at, left}, ~static_cast<std::uint32_t>(crc));
}

using Sum = std::uint32_t (*)(std::span<const std::byte>, std::uint32_t) noexcept;

Sum choose() noexcept {
  if (__builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("vpclmulqdq") != 0) return &crc32c_wide;
  return __builtin_cpu_supports("sse4.2") != 0 ? &crc32c_sse42 : &crc32c_portable;
}

#endif

}  // namespace

std::uint32_t crc32c_portable(std::span<const std::byte> bytes, std::uint32_t before) noexcept {
  std::uint32_t crc = ~before;
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= 8; left -= 8, at += 8) {
    // Little-endian by construction, whatever the processor's order is.
    std::uint32_t low = crc;
    for (std::size_t k = 0; k < 4; ++k) low ^= std::to_integer<std::uint32_t>(at[k]) << (8 * k);
    crc = kTables[7][low & 0xff] ^ kTables[6][(low >> 8) & 0xff] ^ kTables[5][(low >> 16) & 0xff] ^ kTables[4][low >> 24];
    for (std::size_t k = 4; k < 8; ++k) crc ^= kTables[7 - k][std::to_integer<std::size_t>(at[k])];
  }
  for (; left > 0; --left, ++at) crc = (crc >> 8) ^ kTables[0][(crc ^ std::to_integer<std::uint32_t>(*at)) & 0xff];
  return ~crc;
}

bool crc32c_is_in_hardware() noexcept {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2") != 0;
#else
  return false;
#endif
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before) noexcept {
#if defined(__x86_64__)
  static const Sum sum = choose();
  return sum(bytes, before);
#else
  return crc32c_portable(bytes, before);
#endif
}

}  // namespace adaptra::delegate
