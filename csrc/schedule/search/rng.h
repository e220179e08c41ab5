// Reproducible random numbers for the search.
#pragma once

#include <cstdint>

namespace adaptra::schedule {

// A small generator (splitmix64): the same seed gives the same numbers on every machine.
class Rng {
 public:
  explicit Rng(std::uint64_t seed) : state_(seed) {}

  std::int32_t below(std::int32_t count) { return static_cast<std::int32_t>(next() % static_cast<std::uint64_t>(count)); }

  // A number of 0 up to, not including, 1.
  double unit() { return static_cast<double>(next() >> 11U) * 0x1.0p-53; }

  // The number of heads before the first tails of a fair coin, at most `most`: small numbers are likely.
  std::int32_t geometric(std::int32_t most) {
    std::int32_t count = 0;
    for (std::uint64_t coins = next(); count < most && (coins & 1U); coins >>= 1U) ++count;
    return count;
  }

 private:
  std::uint64_t next() {
    state_ += 0x9E3779B97F4A7C15ULL;
    std::uint64_t mixed = state_;
    mixed = (mixed ^ (mixed >> 30U)) * 0xBF58476D1CE4E5B9ULL;
    mixed = (mixed ^ (mixed >> 27U)) * 0x94D049BB133111EBULL;
    return mixed ^ (mixed >> 31U);
  }

  std::uint64_t state_;
};

}  // namespace adaptra::schedule
