// The checksum of numbers in host memory, in one pass.
#pragma once

#include <cstddef>
#include <cstdint>

namespace adaptra {

// Returns what adaptra.runtime.data_parallel.checksum says of numbers: their weighted sum modulo 2^64, block by block.
//
// A block has as many numbers as there are weights; the last one may have fewer.
std::int64_t weighted_sum(const std::int64_t* numbers, std::size_t count, const std::int64_t* weights, std::size_t block);

}  // namespace adaptra
