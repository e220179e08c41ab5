// Plans of large jobs: microbatches of lost workers are inserted into the orders of one healthy replica.
//
// All times are of one step in which every op starts as early as its order allows. A replica with lost workers counts on each
// of their ops to end some slack after its input is there. The replicas that compute them insert them within this promise, so
// that replicas are timed one by one. The period is the longest time from a worker's first op to the end of its Step. Steps
// that repeat after it keep every promise again. Orders that are executed as early as possible are never later than that.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "schedule/simulate/problem.h"

namespace adaptra::schedule {

// A microbatch of a lost worker, and the replica whose worker of the same stage computes it.
struct Foreign {
  std::int32_t home;
  std::int32_t stage;
  std::int32_t microbatch;
  std::int32_t host;
};

// A replica with lost workers. Of their orders only that each op stands somewhere matters.
struct Home {
  std::int32_t replica;
  std::vector<Order> orders;
};

// The order of a worker that computes foreign microbatches, with Reduce and Step at its end.
struct HostOrder {
  std::int32_t replica;
  std::int32_t stage;
  Order order;
};

struct Insertion {
  double period;  // steps are at most this far apart
  std::vector<HostOrder> hosts;
};

// `pipeline` is one healthy replica with one stage per worker. It has no slow workers, and no message occupies a link. `orders`
// are its orders, from which those of the hosts are made. No home is a host. `memory` has the most microbatches per stage,
// `slack` that of the promises in times of F, I and W together. Nothing if memory or slack is too little.
[[nodiscard]] std::optional<Insertion> insert_foreign(const Problem& pipeline, const std::vector<Order>& orders,
                                                      const std::vector<Home>& homes, const std::vector<Foreign>& foreign,
                                                      const std::vector<std::int32_t>& memory, double slack);

}  // namespace adaptra::schedule
