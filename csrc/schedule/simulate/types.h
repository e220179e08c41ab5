// The planning problem as plain numbers: what adaptra.simulation.cost and adaptra.program hold, without Python.
#pragma once

#include <array>
#include <cstddef>
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
  std::vector<double> update;        // per stage: between the last op of a step and the next step

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

// The letters of adaptra.program.Kind that occupy a worker. Messages are timed, not executed.
enum class JobKind : std::uint8_t { F, I, W, B, Reduce, Step };

constexpr std::size_t kJobKinds = 6;

[[nodiscard]] constexpr unsigned bit_of(JobKind kind) { return 1U << static_cast<unsigned>(kind); }

// An op of several replicas.
struct JobOp {
  std::int32_t replica;
  std::int32_t stage;
  JobKind kind;
  std::int32_t microbatch;  // 0 for Reduce and Step
};

using JobOrder = std::vector<JobOp>;

// When a row counts, as adaptra.program.dependencies.When says.
enum class When : std::uint8_t { Always, HandedOver, Changing };

// One row of adaptra.program.dependencies.RULE: what an op of the row's kind needs. That is an op of one of `kinds`, `offset`
// stages further and `later` microbatches later.
struct JobRow {
  std::int32_t offset;
  std::vector<JobKind> kinds;
  std::int32_t later;
  When when;
};
using JobRule = std::array<std::vector<JobRow>, 4>;  // of F, I, W and B

[[nodiscard]] constexpr std::uint8_t bit_of(Kind kind) { return static_cast<std::uint8_t>(1U << static_cast<unsigned>(kind)); }

// A cost model, the number of microbatches of a step, the rank of each stage, and what ops need.
struct Problem {
  Cost cost;
  std::int32_t microbatches = 0;
  std::vector<std::int32_t> placement;
  std::int32_t ranks = 0;
  JobRule rule;
};

}  // namespace adaptra::schedule
