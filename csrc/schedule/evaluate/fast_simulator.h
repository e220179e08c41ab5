// Simulates many similar orders, fast: keeps no records, reuses its memory, and gives up early on orders that take too long.
//
// It covers orders in which F, I and W of every stage each come in microbatch order, in every mode of blocking. The two
// directions of a link must not share it. Its makespans are those of simulate(), up to rounding.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/simulate/problem.h"
#include "schedule/simulate/sequence.h"

namespace adaptra::schedule {

// Ops first to last of a rank's sequence, which follow each other without a gap on the critical path.
struct Block {
  std::size_t rank, first, last;
};

class FastSimulator {
 public:
  explicit FastSimulator(const Problem& problem);

  // Whether it covers the problem's mode of communication.
  [[nodiscard]] static bool covers(const Problem& problem) { return !problem.cost.half_duplex; }

  // Returns the makespan. Infinity when ranks wait for each other forever, or when it is certain to be longer than `cutoff`.
  // Every sequence holds F, I and W of its stages once per microbatch, each I after its F and each W after its I.
  //
  // Sequences that agree with those last kept until the time `since` are only timed from then on; see decided_at().
  [[nodiscard]] double makespan(const std::vector<Sequence>& sequences, double cutoff, double since = 0.0);

  // Whether fill() covers it too: not where messages hold their receivers.
  [[nodiscard]] static bool fills(const Problem& problem) { return covers(problem) && problem.cost.blocking != Blocking::Both; }

  // Does the same for orders of F and I alone, into which it puts W. A W fills a gap that is at least its stage's `patience`
  // times as long as the W. Other W run where an F needs their memory, or at the end.
  [[nodiscard]] double fill(const std::vector<Sequence>& orders, const std::vector<float>& patience, double cutoff,
                            double since = 0.0);

  // The whole sequences of the last fill().
  [[nodiscard]] const std::vector<Sequence>& filled() const { return filled_; }

  // Keeps the step last timed, so that later ones may continue from within it. Requires that its makespan was finite.
  void keep();

  // The time at which a rank decided on the op at `position` of its sequence, in the step last kept. Another op in that place
  // changes nothing before that time. In orders that were filled, positions count F and I.
  [[nodiscard]] double decided_at(std::size_t rank, std::size_t position) const;

  // Finds a critical path of the step last kept: a chain of ops and messages without gaps that ends with the step. `sequences`
  // are the whole sequences of that step.
  void critical_blocks(const std::vector<Sequence>& sequences, std::vector<Block>& blocks) const;

 private:
  struct Directed {
    double occupancy, latency;
    std::size_t link;  // into link_free_
  };
  struct RankState {
    std::size_t position, first_record;
    double now, work, idle;
    bool queued;
    double held = 0.0;       // memory, where W are filled in
    double urgent_left = 0;  // time of the F and I that have not run
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

  // The times of all ops and messages of a step.
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
  std::vector<double> link_free_;                    // per directed link between two ranks
  Trace trace_, kept_;                               // of the step last timed, and of the one last kept: empty before
  std::vector<std::uint32_t> forwards_, gradients_;  // per stage, how many have run
  std::vector<std::uint32_t> weight_grads_;          // the same
  std::vector<std::vector<std::size_t>> stages_of_;  // per rank
  std::vector<std::size_t> first_record_;            // per rank, into Trace::times
  std::vector<double> memory_limit_;                 // per rank
  std::vector<double> urgent_work_;                  // per rank, the time of all its F and I
  std::vector<double> tail_;                         // per rank, the least time after its last F or I
  std::vector<Sequence> filled_, kept_filled_;       // with W filled in; empty where sequences have their own
  const std::vector<float>* patience_ = nullptr;     // of the fill() at hand
  std::vector<RankState> ranks_;
  std::vector<std::size_t> runnable_;
  // Used where messages hold receivers: the ranks, and for each op the one whose end or message let it begin.
  std::vector<HeldRank> held_ranks_;
  std::vector<std::uint32_t> causes_;
};

}  // namespace adaptra::schedule
