#include "schedule/simulate/sequence.h"

#include <cstddef>

namespace adaptra::schedule {

std::vector<Sequence> to_sequences(const std::vector<Order>& orders) {
  std::vector<Sequence> sequences(orders.size());
  for (std::size_t rank = 0; rank < orders.size(); ++rank) {
    sequences[rank].reserve(orders[rank].size());
    for (const Op& op : orders[rank]) {
      if (!is_update(op.kind)) sequences[rank].push_back(code_of(op.stage, op.kind));
    }
  }
  return sequences;
}

std::vector<Order> to_orders(const std::vector<Sequence>& sequences, std::int32_t stages) {
  std::vector<std::int32_t> next(4 * static_cast<std::size_t>(stages), 0);
  std::vector<Order> orders(sequences.size());
  for (std::size_t rank = 0; rank < sequences.size(); ++rank) {
    orders[rank].reserve(sequences[rank].size());
    for (const std::int32_t code : sequences[rank])
      orders[rank].push_back({0, stage_of(code), kind_of(code), next[static_cast<std::size_t>(code)]++});
  }
  return orders;
}

}  // namespace adaptra::schedule
