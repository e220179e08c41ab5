#include "schedule/simulate/rule.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <stdexcept>

namespace adaptra::schedule {

namespace {

// Whether some microbatch of a replica is on another worker than the one before it, on some stage.
bool changes_workers(const Problem& problem) {
  for (std::size_t first = 0; first < problem.holder.size(); first += static_cast<std::size_t>(problem.microbatches)) {
    const auto begin = problem.holder.begin() + static_cast<std::ptrdiff_t>(first);
    if (std::adjacent_find(begin, begin + problem.microbatches, std::not_equal_to<>()) != begin + problem.microbatches)
      return true;
  }
  return false;
}

}  // namespace

CompiledRule::CompiledRule(const Problem& problem) {
  const bool changes = changes_workers(problem);
  std::vector<Column> all;
  for (std::size_t kind = 0; kind < problem.rule.size(); ++kind) {
    for (const Row& row : problem.rule[kind]) {
      if (std::abs(row.offset) > 1) throw std::invalid_argument("a dependency points further than to a neighbouring stage");
      if (row.when != When::Always && !(changes && (row.when == When::Changing || problem.hands_over))) continue;
      auto found = std::find(all.begin(), all.end(), row);
      if (found == all.end()) found = all.insert(found, {row, all.size()});
      needs[kind].push_back(*found);
    }
  }
  for (std::size_t kind = 0; kind < meets.size(); ++kind) {
    for (const Column& column : all) {
      if (column.is_met_by(static_cast<Kind>(kind))) meets[kind].push_back(column);
    }
  }
  columns = all.size();
}

}  // namespace adaptra::schedule
