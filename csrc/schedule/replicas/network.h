// The ops of all workers as numbered nodes with their needs looked up, for whatever order the workers run them in.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "schedule/simulate/problem.h"

namespace adaptra::schedule {

constexpr std::int32_t kNone = -1;
constexpr std::size_t kMostNeeds = 3;  // the most rows of a kind

// One need of an op: the op that meets it, and the message that brings it, if the two are on different workers.
struct Need {
  std::int32_t node = kNone;
  std::int32_t transfer = kNone;  // a row of Network::transfers
  double delay = 0.0;             // of a message that occupies nothing
};

struct Node {
  std::int32_t replica;
  std::int32_t worker;
  std::int32_t stage;
  Kind kind;
  double duration;
  std::array<Need, kMostNeeds> needs;
};

// The links and ports that one message occupies, and for how long.
struct Transfer {
  std::array<std::int32_t, 3> resource;
  std::array<double, 3> occupancy;
  double latency;
};

// The nodes of the given orders, numbered worker by worker. Keeps a reference to the problem.
class Network {
 public:
  Network(const Problem& problem, const std::vector<Order>& orders);

  const Problem& problem;
  std::vector<Node> nodes;
  std::vector<std::int32_t> first;  // per worker: its first node; and one more
  std::vector<Transfer> transfers;
  std::int32_t resources = 0;

  [[nodiscard]] std::size_t workers() const { return first.size() - 1; }

 private:
  void number(const Op& op);
  void connect(Node& node, const Op& op, std::int32_t worker);
  [[nodiscard]] bool counts(const Row& row, std::int32_t stage) const;
  void carry(Need& need, std::int32_t from, std::int32_t to, std::int32_t source, std::int32_t destination);
  std::int32_t resource_of(std::int32_t source, std::int32_t destination);

  std::map<std::pair<std::int32_t, std::int32_t>, const Link*> links_;
  std::map<std::pair<std::int32_t, std::int32_t>, std::int32_t> resource_of_;
  std::array<std::vector<std::int32_t>, std::tuple_size_v<Rule>>
      made_;  // per kind: the node of (replica, stage, microbatch); kNone
};

}  // namespace adaptra::schedule
