// The critical path of the step that a FastSimulator kept.
#include <algorithm>

#include "schedule/evaluate/fast_simulator.h"
#include "schedule/simulate/constants.h"

namespace adaptra::schedule {
// The record of the op whose end, or whose message, let the op at `record` begin. `record` itself if the op began with the
// step.
std::size_t FastSimulator::record_before(const std::vector<Sequence>& sequences, std::size_t rank, std::size_t record) const {
  const std::size_t base = ranks_[rank].first_record;
  if (kept_.times[record].start <= 0.0) return record;
  if (receiver_waits_) return causes_[record];
  if (record > base && kept_.times[record - 1].released >= kept_.times[record].start) return record - 1;
  const std::int32_t code = sequences[rank][record - base];
  const std::size_t s = at(stage_of(code));
  const bool forward = kind_of(code) == Kind::F;
  if (kind_of(code) == Kind::W || (forward ? s == 0 : s + 1 == stages_)) return record;
  const std::size_t producer = forward ? s - 1 : s + 1;
  const auto& records = forward ? kept_.forward_record : kept_.gradient_record;
  const auto& there = forward ? kept_.forward_there : kept_.gradient_there;
  const Directed& edge = forward ? forward_[s - 1] : backward_[s];
  const auto row = records.begin() + static_cast<std::ptrdiff_t>(s * microbatches_);
  const auto here = std::lower_bound(row, row + static_cast<std::ptrdiff_t>(microbatches_), static_cast<std::uint32_t>(record));
  auto m = static_cast<std::size_t>(here - row);
  // A message that queued was held up by the one before it.
  while (m > 0 && kept_.times[records[producer * microbatches_ + m]].end + edge.occupancy + edge.latency + kTolerance <
                      there[s * microbatches_ + m])
    --m;
  return records[producer * microbatches_ + m];
}

void FastSimulator::critical_blocks(const std::vector<Sequence>& sequences, std::vector<Block>& blocks) const {
  blocks.clear();
  std::size_t rank = 0;
  double latest = -1.0;
  for (std::size_t r = 0; r < ranks_.size(); ++r) {
    if (sequences[r].empty()) continue;
    const double end = kept_.times[ranks_[r].first_record + sequences[r].size() - 1].end;
    if (end > latest) {
      latest = end;
      rank = r;
    }
  }
  std::size_t record = ranks_[rank].first_record + sequences[rank].size() - 1;
  blocks.push_back({rank, sequences[rank].size() - 1, sequences[rank].size() - 1});
  while (true) {
    const std::size_t before = record_before(sequences, rank, record);
    if (before == record) return;
    const bool here = before + 1 == record && record > ranks_[rank].first_record;
    if (!here) {
      rank = 0;
      while (rank + 1 < ranks_.size() && ranks_[rank + 1].first_record <= before) ++rank;
      blocks.push_back({rank, 0, before - ranks_[rank].first_record});
    }
    record = before;
    blocks.back().first = record - ranks_[rank].first_record;
  }
}

}  // namespace adaptra::schedule
