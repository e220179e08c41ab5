#include "schedule/replicas/network.h"

#include <algorithm>
#include <stdexcept>

namespace adaptra::schedule {

Network::Network(const Problem& given, const std::vector<Order>& orders) : problem(given) {
  if (problem.rule[0].empty()) throw std::invalid_argument("a problem without the rule of needs");
  for (const Link& link : problem.links) links_[{link.source, link.destination}] = &link;
  const std::size_t ops = problem.holder.size();
  for (std::vector<std::int32_t>& table : made_) table.assign(ops, kNone);
  for (const Order& order : orders) {
    first.push_back(static_cast<std::int32_t>(nodes.size()));
    for (const Op& op : order) number(op);
  }
  first.push_back(static_cast<std::int32_t>(nodes.size()));
  std::int32_t node = 0;
  for (std::size_t worker = 0; worker < orders.size(); ++worker) {
    for (const Op& op : orders[worker]) connect(nodes[static_cast<std::size_t>(node++)], op, static_cast<std::int32_t>(worker));
  }
}

void Network::number(const Op& op) {
  const auto node = static_cast<std::int32_t>(nodes.size());
  nodes.push_back({});
  if (is_update(op.kind)) return;
  made_[static_cast<std::size_t>(op.kind)][problem.index(op.replica, op.stage, op.microbatch)] = node;
}

void Network::connect(Node& node, const Op& op, std::int32_t worker) {
  node.worker = worker;
  node.replica = op.replica;
  node.stage = op.stage;
  node.kind = op.kind;
  node.duration = problem.cost.duration(op.stage, op.kind) * problem.slow[static_cast<std::size_t>(worker)];
  if (is_update(op.kind)) return;
  auto next = node.needs.begin();
  for (const Row& row : problem.rule[static_cast<std::size_t>(op.kind)]) {
    const std::int32_t stage = op.stage + row.offset, microbatch = op.microbatch + row.later;
    if (stage < 0 || stage >= problem.stages || microbatch < 0 || !counts(row, op.stage)) continue;
    const std::size_t at = problem.index(op.replica, stage, microbatch);
    for (std::size_t kind = 0; kind < made_.size(); ++kind) {
      if (row.is_met_by(static_cast<Kind>(kind))) next->node = std::max(next->node, made_[kind][at]);
    }
    if (const std::int32_t other = problem.holder[at]; other != worker) {
      if (row.when == When::Always) {
        carry(*next, stage, op.stage, other, worker);
      } else {
        next->delay = problem.hand_over;
      }
    }
    ++next;
  }
}

// Rows that count between two workers only are needs on one worker too: it runs a stage's ops in microbatch order anyway.
bool Network::counts(const Row& row, std::int32_t stage) const {
  switch (row.when) {
    case When::HandedOver: return problem.hands_over;
    case When::Changing: return problem.changing[static_cast<std::size_t>(stage)] != 0;
    case When::Always: return true;
  }
  return true;  // unreachable; GCC does not see that the switch is complete
}

void Network::carry(Need& need, std::int32_t from, std::int32_t to, std::int32_t source, std::int32_t destination) {
  const auto edge = static_cast<std::size_t>(std::min(from, to));
  Link link = {source, destination, problem.cost.latency_forward[edge], problem.cost.occupancy_forward[edge]};
  if (to < from) link = {source, destination, problem.cost.latency_backward[edge], problem.cost.occupancy_backward[edge]};
  if (const auto found = links_.find({source, destination}); found != links_.end()) link = *found->second;
  const double gives = problem.port[static_cast<std::size_t>(source)],
               takes = problem.port[static_cast<std::size_t>(destination)];
  if (link.occupancy == 0.0 && gives == 0.0 && takes == 0.0) {
    need.delay = link.latency;
    return;
  }
  need.transfer = static_cast<std::int32_t>(transfers.size());
  // What a message does not occupy makes it wait for nothing: the first of the three that it does stands for that.
  const std::array<std::int32_t, 3> place = {resource_of(source, kNone), resource_of(source, destination),
                                             resource_of(kNone, destination)};
  const std::array<double, 3> takes_time = {gives, link.occupancy, takes};
  const auto occupied = static_cast<std::size_t>(
      std::find_if(takes_time.begin(), takes_time.end(), [](double time) { return time > 0.0; }) - takes_time.begin());
  Transfer transfer{place, takes_time, link.latency};
  for (std::size_t i = 0; i < place.size(); ++i) {
    if (takes_time[i] > 0.0) continue;
    transfer.resource[i] = place[occupied];
    transfer.occupancy[i] = takes_time[occupied];
  }
  transfers.push_back(transfer);
}

// A port that sends is (worker, none), one that receives (none, worker), a link both.
std::int32_t Network::resource_of(std::int32_t source, std::int32_t destination) {
  const auto [place, is_new] = resource_of_.try_emplace({source, destination}, resources);
  if (is_new) ++resources;
  return place->second;
}

}  // namespace adaptra::schedule
