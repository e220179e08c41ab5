// The planning problem as plain numbers: what adaptra.simulation.cost and adaptra.program hold, without Python.
#pragma once

#include <cstdint>
#include <vector>

namespace adaptra::schedule {

// The letters of adaptra.program.Kind that occupy a device. Communication ops never reach this library.
enum class Kind : std::uint8_t { F, I, W, B };

// Whether communication holds the stages; see adaptra.simulation.cost.Blocking.
enum class Blocking : std::uint8_t { None, Send, Both };

struct Op {
  std::int32_t stage;
  Kind kind;
  std::int32_t microbatch;
};

using Order = std::vector<Op>;

// Costs per stage and per edge; edge i joins stages i and i + 1. Same meaning and units as adaptra.simulation.cost.CostModel.
struct Cost {
  std::vector<double> forward, input_grad, weight_grad;
  std::vector<double> latency_forward, latency_backward;
  std::vector<double> occupancy_forward, occupancy_backward;
  bool half_duplex = false;
  Blocking blocking = Blocking::None;
  std::vector<double> memory_forward, memory_input_grad;
  std::vector<double> memory_limit;  // per rank; empty when there is none

  [[nodiscard]] std::int32_t stages() const { return static_cast<std::int32_t>(forward.size()); }

  [[nodiscard]] double duration(std::int32_t stage, Kind kind) const {
    const auto s = static_cast<std::size_t>(stage);
    switch (kind) {
      case Kind::F: return forward[s];
      case Kind::I: return input_grad[s];
      case Kind::W: return weight_grad[s];
      case Kind::B: return input_grad[s] + weight_grad[s];
    }
    return 0.0;  // unreachable; GCC does not see that the switch is complete
  }
};

// A cost model, the number of microbatches of a step, and the rank of each stage.
struct Problem {
  Cost cost;
  std::int32_t microbatches = 0;
  std::vector<std::int32_t> placement;
  std::int32_t ranks = 0;
};

// One row of adaptra.program.dependencies.RULE that always counts. An op of `kind` on stage s needs an op of one of `kinds` on
// stage s + offset and the same microbatch. `kinds` has bit_of(kind) set for every kind that meets the need.
struct Row {
  Kind kind;
  std::int32_t offset;
  std::uint8_t kinds;
};

using Rule = std::vector<Row>;

[[nodiscard]] constexpr std::uint8_t bit_of(Kind kind) { return static_cast<std::uint8_t>(1U << static_cast<unsigned>(kind)); }

}  // namespace adaptra::schedule
