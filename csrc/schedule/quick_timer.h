// The makespan of many similar orders, fast: no records are kept, memory is reused, and hopeless orders are given up early.
//
// It covers orders in which F, I and W of every stage come in microbatch order, on links with both directions of their own,
// whatever messages hold. What it says is what simulate() says, up to rounding.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/types.h"

namespace adaptra::schedule {

// The ops of a rank without their microbatches, which follow from the order: 4 * stage + kind.
using Sequence = std::vector<std::int32_t>;

[[nodiscard]] constexpr std::int32_t code_of(std::int32_t stage, Kind kind) {
  return 4 * stage + static_cast<std::int32_t>(kind);
}
[[nodiscard]] constexpr std::int32_t stage_of(std::int32_t code) { return code / 4; }
[[nodiscard]] constexpr Kind kind_of(std::int32_t code) { return static_cast<Kind>(code % 4); }

[[nodiscard]] std::vector<Sequence> to_sequences(const std::vector<Order>& orders);
[[nodiscard]] std::vector<Order> to_orders(const std::vector<Sequence>& sequences, std::int32_t stages);

// Ops first … last of a rank's sequence that follow each other without a gap on the critical path.
struct Block {
  std::size_t rank, first, last;
};

class QuickTimer {
 public:
  explicit QuickTimer(const Problem& problem);

  // Whether it covers the problem's mode of communication.
  [[nodiscard]] static bool covers(const Problem& problem) { return !problem.cost.half_duplex; }

  // The makespan, or infinity when ranks wait for each other forever or when it is certain to be longer than `cutoff`. Every
  // sequence holds F, I and W of its stages once per microbatch, each I after its F and each W after its I.
  [[nodiscard]] double makespan(const std::vector<Sequence>& sequences, double cutoff);

  // A chain of ops and messages without gaps that ends with the step last timed, which must have had a finite makespan.
  void critical_blocks(const std::vector<Sequence>& sequences, std::vector<Block>& blocks) const;

 private:
  struct Directed {
    double occupancy, latency, free;
  };
  struct RankState {
    std::size_t position, first_record;
    double now, work, idle;
    bool queued;
  };
  struct Times {
    double start, end, released;
  };
  struct HeldRank {
    std::uint32_t position, first_record, held_by;
    bool running;
    double end, held_until, work_left;
  };

  [[nodiscard]] double run_in_time_order(const std::vector<Sequence>& sequences, double cutoff);
  bool begin(std::size_t rank, const Sequence& sequence, double now);
  void end(std::size_t rank, const Sequence& sequence, double now);
  [[nodiscard]] double input_there(std::int32_t code, std::uint32_t& producer) const;
  [[nodiscard]] std::size_t record_before(const std::vector<Sequence>& sequences, std::size_t rank, std::size_t record) const;

  bool run_ahead(std::size_t rank, const Sequence& sequence, double cutoff);
  void wake(std::int32_t stage, std::size_t by);

  const Cost& cost_;
  const Problem& problem_;
  const std::size_t stages_, microbatches_;
  const bool sender_waits_, receiver_waits_;
  std::vector<Directed> forward_, backward_;
  std::vector<double> forward_there_, gradient_there_;           // per stage and microbatch
  std::vector<std::uint32_t> forward_record_, gradient_record_;  // per stage and microbatch: the producer in times_
  std::vector<std::uint32_t> forwards_, gradients_;              // per stage, how many have run
  std::vector<RankState> ranks_;
  std::vector<std::size_t> runnable_;
  std::vector<Times> times_;  // per op, rank by rank
  // Where receivers wait too: the ranks, and per op the one whose end or message let it begin.
  std::vector<HeldRank> held_ranks_;
  std::vector<std::uint32_t> causes_;
};

}  // namespace adaptra::schedule
