// Ops, their orders and what they wait for, as plain numbers: what adaptra.program holds, without Python.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace adaptra::schedule {

// The letters of adaptra.program.Kind that occupy a worker. Messages are timed, not executed.
enum class Kind : std::uint8_t { F, I, W, B, Reduce, Step };

constexpr std::size_t kKinds = 6;

[[nodiscard]] constexpr unsigned bit_of(Kind kind) { return 1U << static_cast<unsigned>(kind); }
[[nodiscard]] constexpr bool is_update(Kind kind) { return kind >= Kind::Reduce; }

struct Op {
  std::int32_t replica;
  std::int32_t stage;
  Kind kind;
  std::int32_t microbatch;  // 0 for Reduce and Step
};

using Order = std::vector<Op>;

// Orders, one per worker, and how long their steps take: the makespan or the period.
struct Plan {
  double time;
  std::vector<Order> orders;
};

// When a row counts, as adaptra.program.dependencies.When says.
enum class When : std::uint8_t { Always, HandedOver, Changing };

// One row of adaptra.program.dependencies.RULE: what an op of the row's kind needs. That is an op of one of `kinds`, `offset`
// stages further and `later` microbatches later.
struct Row {
  std::int32_t offset;
  unsigned kinds;  // bit_of(kind) of each
  std::int32_t later;
  When when;

  [[nodiscard]] bool is_met_by(Kind kind) const { return (kinds & bit_of(kind)) != 0; }
  bool operator==(const Row&) const = default;
};
using Rule = std::array<std::vector<Row>, 4>;  // of F, I, W and B

}  // namespace adaptra::schedule
