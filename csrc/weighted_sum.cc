#include "weighted_sum.h"

#include <algorithm>

namespace adaptra {

std::int64_t weighted_sum(const std::int64_t* numbers, std::size_t count, const std::int64_t* weights, std::size_t block) {
  constexpr std::uint64_t kOfEarlierBlocks = 6'364'136'223'846'793'005;
  std::uint64_t total = 0;
  for (std::size_t begin = 0; begin < count; begin += block) {
    const std::int64_t* of_block = numbers + begin;
    const std::size_t length = std::min(block, count - begin);
    std::uint64_t sum = 0;
    for (std::size_t index = 0; index < length; ++index) {
      const std::int64_t number = of_block[index];
      sum += (static_cast<std::uint64_t>(number >> 32) + static_cast<std::uint64_t>(number)) *
             static_cast<std::uint64_t>(weights[index]);
    }
    total = total * kOfEarlierBlocks + sum;
  }
  return static_cast<std::int64_t>(total);
}

}  // namespace adaptra
