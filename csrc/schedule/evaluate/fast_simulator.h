// The makespan of many similar orders, fast: no records are kept, memory is reused, and hopeless orders are given up early.
//
// It covers orders in which F, I and W of every stage come in microbatch order, on links with both directions of their own,
// whatever messages hold. What it says is what simulate() says, up to rounding.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/simulate/sequence.h"
#include "schedule/simulate/types.h"

namespace adaptra::schedule {

// Ops first … last of a rank's sequence that follow each other without a gap on the critical path.
struct Block {
  std::size_t rank, first, last;
};

class FastSimulator {
 public:
  explicit FastSimulator(const Problem& problem);

  // Whether it covers the problem's mode of communication.
  [[nodiscard]] static bool covers(const Problem& problem) { return !problem.cost.half_duplex; }

  // The makespan, or infinity when ranks wait for each other forever or when it is certain to be longer than `cutoff`. Every
  // sequence holds F, I and W of its stages once per microbatch, each I after its F and each W after its I.
  //
  // Sequences that are like those last kept until the time `since` are only timed from then on; see decided_at().
  [[nodiscard]] double makespan(const std::vector<Sequence>& sequences, double cutoff, double since = 0.0);

  // Whether fill() covers it too: not where messages hold their receivers.
  [[nodiscard]] static bool fills(const Problem& problem) { return covers(problem) && problem.cost.blocking != Blocking::Both; }

  // The same for orders of F and I alone, into which it puts W: wherever a rank waits for at least `patience` (of the stage)
  // times what the W takes, where an F needs its memory, and at the end.
  [[nodiscard]] double fill(const std::vector<Sequence>& orders, const std::vector<float>& patience, double cutoff,
                            double since = 0.0);

  // The whole sequences of the last fill().
  [[nodiscard]] const std::vector<Sequence>& filled() const { return filled_; }

  // Keeps the step last timed, which must have had a finite makespan, for what follows to begin like it.
  void keep();

  // When, in the step last kept, a rank decided on the op at `position` of its sequence: what comes before that time stays as
  // it is whatever takes that op's place. In orders that were filled, positions count F and I.
  [[nodiscard]] double decided_at(std::size_t rank, std::size_t position) const;

  // A chain of ops and messages without gaps that ends with the step last kept, whose (whole) sequences these are.
  void critical_blocks(const std::vector<Sequence>& sequences, std::vector<Block>& blocks) const;

 private:
  struct Directed {
    double occupancy, latency, free;
  };
  struct RankState {
    std::size_t position, first_record;
    double now, work, idle;
    bool queued;
    double held = 0.0;       // memory, where W are filled in
    double urgent_left = 0;  // what the F and I take that have not run
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

  // What is known of every op and message of a step.
  struct Trace {
    std::vector<Times> times;                           // per op, rank by rank
    std::vector<double> forward_there, gradient_there;  // per stage and microbatch, when its input is there
    std::vector<double> forward_free, gradient_free;    // per sending stage and microbatch, when its edge is free again
    std::vector<std::uint32_t> forward_record, gradient_record;  // per stage and microbatch: the op in `times`
  };

  template <bool fills>
  [[nodiscard]] double run(const std::vector<Sequence>& orders, double cutoff, double since);
  template <bool fills>
  void resume(std::size_t rank, const Sequence& order, double since);
  template <bool fills>
  bool run_ahead(std::size_t rank, const Sequence& sequence, double cutoff);
  void fill_gap(std::size_t rank, double until, double& now);
  bool make_room(std::size_t rank, std::size_t stage, double& now);
  void put_weight_grad(std::size_t rank, std::size_t stage, double& now);
  void wake(std::int32_t stage, std::size_t by);

  const Cost& cost_;
  const Problem& problem_;
  const std::size_t stages_, microbatches_;
  const bool sender_waits_, receiver_waits_;
  std::vector<Directed> forward_, backward_;
  Trace trace_, kept_;                               // of the step last timed, and of the one last kept: empty before
  std::vector<std::uint32_t> forwards_, gradients_;  // per stage, how many have run
  std::vector<std::uint32_t> weight_grads_;          // the same
  std::vector<std::vector<std::size_t>> stages_of_;  // per rank
  std::vector<std::size_t> first_record_;            // per rank, into Trace::times
  std::vector<double> memory_limit_;                 // per rank
  std::vector<double> urgent_work_;                  // per rank, what its F and I take
  std::vector<double> tail_;                         // per rank, what at least follows its last F or I
  std::vector<Sequence> filled_, kept_filled_;       // with W filled in; empty where sequences have their own
  const std::vector<float>* patience_ = nullptr;     // of the fill() at hand
  std::vector<RankState> ranks_;
  std::vector<std::size_t> runnable_;
  // Where receivers wait too: the ranks, and per op the one whose end or message let it begin.
  std::vector<HeldRank> held_ranks_;
  std::vector<std::uint32_t> causes_;
};

}  // namespace adaptra::schedule
