#include "schedule/search/local_search.h"

#include <algorithm>
#include <array>
#include <utility>

#include "schedule/simulate/constants.h"

namespace adaptra::schedule {
namespace {

// Measured on random cases of 4 to 16 stages: shorter histories get stuck, longer ones take too long to descend. After
// kMostFruitless steps without a better plan the search goes back to the best one. At first it then accepts up to kSetBack
// times that makespan.
constexpr std::size_t kHistory = 30;
constexpr std::size_t kMostFruitless = 2000;
constexpr double kSetBack = 1.006;

// The patience to begin with where W are filled in: how long a gap must be, as a share of W.
constexpr std::array<float, 3> kFirstPatience = {1.0F, 0.75F, 0.5F};

}  // namespace

LocalSearch::LocalSearch(const Problem& problem, const std::vector<std::int32_t>& in_flight, WeightGrads weight_grads,
                         Evaluator& evaluator, Rng& rng)
    : problem_(problem),
      limits_(problem, in_flight),
      is_covered_(FastSimulator::covers(problem)),
      filled_(weight_grads == WeightGrads::Filled),
      simulator_(problem),
      evaluator_(evaluator),
      rng_(rng) {}

double LocalSearch::begin_turn() {
  if (std::min(best_makespan_, started_from_) <= evaluator_.best_makespan()) return best_makespan_;
  started_from_ = evaluator_.best_makespan();
  current_ = evaluator_.best();
  if (filled_) {
    for (Sequence& sequence : current_) std::erase_if(sequence, [](std::int32_t code) { return kind_of(code) == Kind::W; });
    set_first_patience();
  }
  start_from_current();
  best_makespan_ = current_makespan_;
  keep_best();
  return started_from_;
}

// Chooses the first patience that suits these orders best, the same for all stages.
void LocalSearch::set_first_patience() {
  since_ = 0.0;
  double shortest = kNever;
  float best = 0.0F;
  for (const float patience : kFirstPatience) {
    patience_.assign(problem_.placement.size(), patience);
    const double makespan = time(kNever);
    if (makespan >= shortest) continue;
    shortest = makespan;
    best = patience;
  }
  patience_.assign(problem_.placement.size(), best);
}

double LocalSearch::time(double cutoff) {
  if (filled_) return simulator_.fill(current_, patience_, cutoff, since_);
  if (is_covered_) return simulator_.makespan(current_, cutoff, since_);
  return evaluator_.time(current_, cutoff);
}

void LocalSearch::keep_current() {
  if (!is_covered_) return;
  simulator_.keep();
  if (filled_) whole_ = simulator_.filled();
}

// Finds the blocks in which ops may move. Where the FastSimulator can't tell which ops are critical, all of them may be.
void LocalSearch::find_blocks() {
  if (filled_) return find_filled_blocks();
  if (is_covered_) return simulator_.critical_blocks(current_, blocks_);
  blocks_.clear();
  for (std::size_t rank = 0; rank < current_.size(); ++rank) blocks_.push_back({rank, 0, current_[rank].size() - 1});
}

// Turns blocks of the whole sequences into positions among the F and I alone. Leaves out blocks of nothing but W.
void LocalSearch::find_filled_blocks() {
  simulator_.critical_blocks(whole_, blocks_);
  std::size_t kept = 0;
  for (const Block& block : blocks_) {
    const Sequence& sequence = whole_[block.rank];
    const auto is_ours = [](std::int32_t code) { return kind_of(code) != Kind::W; };
    const auto first = sequence.begin() + static_cast<std::ptrdiff_t>(block.first);
    const auto last = sequence.begin() + static_cast<std::ptrdiff_t>(block.last) + 1;
    const auto before = static_cast<std::size_t>(std::count_if(sequence.begin(), first, is_ours));
    const auto within = static_cast<std::size_t>(std::count_if(first, last, is_ours));
    if (within > 0) blocks_[kept++] = {block.rank, before, before + within - 1};
  }
  blocks_.resize(kept);
}

void LocalSearch::keep_best() {
  best_ = current_;
  best_patience_ = patience_;
}

void LocalSearch::restart() {
  current_ = best_;
  patience_ = best_patience_;
  start_from_current();
}

// Goes on from the current orders as if nothing had been tried.
void LocalSearch::start_from_current() {
  since_ = 0.0;
  current_makespan_ = time(kNever);
  keep_current();
  find_blocks();
  history_.assign(kHistory, current_makespan_ * kSetBack);
  fruitless_ = 0;
}

std::int64_t LocalSearch::step() {
  if (fruitless_ > kMostFruitless) restart();
  ++fruitless_;
  double& late = history_[steps_++ % history_.size()];
  undo_count_ = 0;
  undo_patience_.clear();
  since_ = kNever;
  if (!change()) {
    late = std::min(late, current_makespan_);
    return evaluator_.timing_effort();
  }
  const double makespan = time(std::max(current_makespan_, late) + kTolerance);
  if (makespan == kNever) {
    undo();
  } else {
    current_makespan_ = makespan;
    keep_current();
    find_blocks();
    if (makespan < best_makespan_ - kTolerance) {
      best_makespan_ = makespan;
      keep_best();
      evaluator_.keep(filled_ ? whole_ : current_, makespan);
      fruitless_ = 0;
    }
  }
  late = std::min(late, current_makespan_);
  return evaluator_.timing_effort();
}

bool LocalSearch::change() {
  if (filled_ && (blocks_.empty() || rng_.below(12) == 0)) {
    change_patience();
    return true;
  }
  bool changed = false;
  for (bool more = true; more; more = rng_.below(4) == 0) changed = move_one() || changed;
  return changed;
}

// Changes the patience of a run of neighbouring stages: how long they wait for an input rather than begin a W.
void LocalSearch::change_patience() {
  undo_patience_ = patience_;
  since_ = 0.0;
  const auto stages = static_cast<std::int32_t>(patience_.size());
  std::int32_t stage = rng_.below(stages);
  const float patience = 0.25F * static_cast<float>(rng_.below(6));
  for (std::int32_t count = 1 + rng_.geometric(stages); count > 0 && stage < stages; --count, ++stage)
    patience_[at(stage)] = patience;
}

// Moves one op of a critical block, or the same op on several stages. False when nothing changes or limits forbid it.
bool LocalSearch::move_one() {
  const Block block = blocks_[at(rng_.below(static_cast<std::int32_t>(blocks_.size())))];
  const Sequence& sequence = current_[block.rank];
  if (block.last >= sequence.size()) return false;  // an earlier move of this step made the block stale
  const auto length = static_cast<std::int32_t>(block.last - block.first + 1);
  const auto any = [&] { return block.first + at(rng_.below(length)); };
  const std::size_t far = 1 + at(rng_.geometric(6));
  std::size_t from = 0, to = 0;
  switch (rng_.below(6)) {
    case 0:
      from = block.last;
      to = from > far ? from - far : 0;
      break;
    case 1:
      from = block.first;
      to = from + far;
      break;
    case 2:
      from = any();
      to = block.first;
      break;
    case 3:
      from = any();
      to = block.last;
      break;
    case 4:
      from = any();
      to = rng_.below(2) == 0 ? from + far : (from > far ? from - far : 0);
      break;
    default: {
      from = any();
      const std::int32_t code = sequence[from];
      const auto microbatch =
          static_cast<std::int32_t>(std::count(sequence.begin(), sequence.begin() + static_cast<std::ptrdiff_t>(from), code));
      const auto by = static_cast<std::int32_t>(far);
      return move_several(block.rank, code, microbatch, rng_.below(2) == 0 ? by : -by);
    }
  }
  return move_op(block.rank, from, to);
}

// Moves the op of one kind and microbatch by the same number of places on a run of neighbouring stages.
bool LocalSearch::move_several(std::size_t rank, std::int32_t code, std::int32_t microbatch, std::int32_t by) {
  const std::int32_t stages = problem_.stages;
  const std::int32_t step = rng_.below(2) == 0 ? 1 : -1;
  std::int32_t stage = stage_of(code);
  bool changed = false;
  for (std::int32_t count = 1 + rng_.below(stages); count > 0 && stage >= 0 && stage < stages; --count, stage += step) {
    rank = at(problem_.placement[at(stage)]);
    const Sequence& sequence = current_[rank];
    std::int32_t left = microbatch;
    std::size_t from = 0;
    for (; from < sequence.size(); ++from)
      if (sequence[from] == code_of(stage, kind_of(code)) && left-- == 0) break;
    const std::ptrdiff_t to = static_cast<std::ptrdiff_t>(from) + by;
    if (from < sequence.size() && move_op(rank, from, static_cast<std::size_t>(std::max<std::ptrdiff_t>(to, 0))))
      changed = true;
  }
  return changed;
}

bool LocalSearch::move_op(std::size_t rank, std::size_t from, std::size_t to) {
  Sequence& sequence = current_[rank];
  to = std::min(to, sequence.size() - 1);
  if (from == to) return false;
  // Ops of one stage and kind keep their order, so a move changes something only where it passes another op.
  const std::int32_t code = sequence[from];
  const std::size_t step = to > from ? 1 : static_cast<std::size_t>(-1);
  bool other = false;
  for (std::size_t p = from; p != to; p += step) other = other || sequence[p + step] != code;
  if (!other) return false;
  if (undo_.size() == undo_count_) undo_.emplace_back();
  Undo& before = undo_[undo_count_];
  before.rank = rank;
  before.sequence = sequence;
  const auto first = sequence.begin() + static_cast<std::ptrdiff_t>(from);
  const auto last = sequence.begin() + static_cast<std::ptrdiff_t>(to);
  if (from < to) {
    std::rotate(first, first + 1, last + 1);
  } else {
    std::rotate(last, first, first + 1);
  }
  if (!(filled_ ? limits_.admits(rank, sequence) : limits_.repair(rank, sequence)) || sequence == before.sequence) {
    sequence = before.sequence;
    return false;
  }
  ++undo_count_;
  const auto differs = std::mismatch(sequence.begin(), sequence.end(), before.sequence.begin()).first;
  if (is_covered_) since_ = std::min(since_, simulator_.decided_at(rank, static_cast<std::size_t>(differs - sequence.begin())));
  return true;
}

void LocalSearch::undo() {
  while (undo_count_ > 0) {
    Undo& before = undo_[--undo_count_];
    current_[before.rank].swap(before.sequence);
  }
  if (!undo_patience_.empty()) patience_.swap(undo_patience_);
}

}  // namespace adaptra::schedule
