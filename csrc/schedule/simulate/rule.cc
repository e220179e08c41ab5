#include "schedule/simulate/rule.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

namespace adaptra::schedule {

CompiledRule::CompiledRule(const Rule& rule) {
  for (const Row& row : rule) {
    if (std::abs(row.offset) > 1) throw std::invalid_argument("a dependency points further than to a neighbouring stage");
    const auto same = [&row](const Column& column) { return column.offset == row.offset && column.kinds == row.kinds; };
    const auto found = std::find_if(columns.begin(), columns.end(), same);
    const auto index = static_cast<std::size_t>(found - columns.begin());
    if (found == columns.end()) columns.push_back({row.offset, row.kinds});
    needs[static_cast<std::size_t>(row.kind)].push_back(index);
  }
  for (const Kind kind : {Kind::F, Kind::I, Kind::W, Kind::B}) {
    for (std::size_t index = 0; index < columns.size(); ++index) {
      if (columns[index].kinds & bit_of(kind)) meets[static_cast<std::size_t>(kind)].push_back(index);
    }
  }
}

}  // namespace adaptra::schedule
