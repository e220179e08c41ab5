#include "schedule/replicas/network.h"

#include <algorithm>

namespace adaptra::schedule {

Network::Network(const Job& given, const std::vector<JobOrder>& orders) : job(given) {
  for (const Link& link : job.links) links_[{link.source, link.destination}] = &link;
  const std::size_t ops = job.holder.size();
  for (std::vector<std::int32_t>& table : made_) table.assign(ops, kNone);
  for (const JobOrder& order : orders) {
    first.push_back(static_cast<std::int32_t>(nodes.size()));
    for (const JobOp& op : order) number(op);
  }
  first.push_back(static_cast<std::int32_t>(nodes.size()));
  std::int32_t node = 0;
  for (std::size_t worker = 0; worker < orders.size(); ++worker) {
    for (const JobOp& op : orders[worker])
      connect(nodes[static_cast<std::size_t>(node++)], op, static_cast<std::int32_t>(worker));
  }
  sends.resize(nodes.size());
  for (const JobNode& one : nodes) {
    for (const Need& need : one.needs) {
      if (need.transfer != kNone) sends[static_cast<std::size_t>(need.node)].push_back(need.transfer);
    }
  }
}

void Network::number(const JobOp& op) {
  const auto node = static_cast<std::int32_t>(nodes.size());
  nodes.push_back({});
  if (op.kind == JobKind::Reduce || op.kind == JobKind::Step) return;
  const std::size_t at = job.index(op.replica, op.stage, op.microbatch);
  if (op.kind == JobKind::F) made_[kForward][at] = node;
  if (op.kind == JobKind::I || op.kind == JobKind::B) made_[kInputGrad][at] = node;
  if (op.kind == JobKind::W || op.kind == JobKind::B) made_[kWeightGrad][at] = node;
}

void Network::connect(JobNode& node, const JobOp& op, std::int32_t worker) {
  node.worker = worker;
  node.replica = op.replica;
  node.stage = op.stage;
  node.kind = op.kind;
  node.duration = job.duration(op.stage, op.kind) * job.slow[static_cast<std::size_t>(worker)];
  auto next = node.needs.begin();
  const auto need = [&](Made made, std::int32_t stage, std::int32_t microbatch, bool is_handed_over = false) {
    const std::size_t at = job.index(op.replica, stage, microbatch);
    next->node = made_[made][at];
    const std::int32_t other = job.holder[at];
    if (other != worker && is_handed_over) next->delay = job.hand_over;
    if (other != worker && !is_handed_over) carry(*next, stage, op.stage, other, worker);
    ++next;
  };
  const bool is_input_grad = op.kind == JobKind::I || op.kind == JobKind::B;
  const bool is_weight_grad = op.kind == JobKind::W || op.kind == JobKind::B;
  if (op.kind == JobKind::F && op.stage > 0) need(kForward, op.stage - 1, op.microbatch);
  if (op.kind == JobKind::F && op.microbatch > 0 && job.changing[static_cast<std::size_t>(op.stage)] != 0)
    need(kForward, op.stage, op.microbatch - 1, true);
  if (is_input_grad) {
    need(kForward, op.stage, op.microbatch);
    if (op.stage + 1 < job.stages) need(kInputGrad, op.stage + 1, op.microbatch);
  }
  if (op.kind == JobKind::W) need(kInputGrad, op.stage, op.microbatch);
  if (is_weight_grad && op.microbatch > 0 && job.hands_over) need(kWeightGrad, op.stage, op.microbatch - 1, true);
}

void Network::carry(Need& need, std::int32_t from, std::int32_t to, std::int32_t source, std::int32_t destination) {
  const auto edge = static_cast<std::size_t>(std::min(from, to));
  Link link = {source, destination, job.latency_forward[edge], job.occupancy_forward[edge]};
  if (to < from) link = {source, destination, job.latency_backward[edge], job.occupancy_backward[edge]};
  if (const auto found = links_.find({source, destination}); found != links_.end()) link = *found->second;
  const double gives = job.port[static_cast<std::size_t>(source)], takes = job.port[static_cast<std::size_t>(destination)];
  if (link.occupancy == 0.0 && gives == 0.0 && takes == 0.0) {
    need.delay = link.latency;
    return;
  }
  need.transfer = static_cast<std::int32_t>(transfers.size());
  if (!job.has_ports) {
    const std::int32_t alone = resource_of(source, destination);
    transfers.push_back({{alone, alone, alone}, {link.occupancy, link.occupancy, link.occupancy}, link.latency});
    return;
  }
  const std::array<std::int32_t, 3> resource = {resource_of(source, kNone), resource_of(source, destination),
                                                resource_of(kNone, destination)};
  transfers.push_back({resource, {gives, link.occupancy, takes}, link.latency});
}

// A port that sends is (worker, none), one that receives (none, worker), a link both.
std::int32_t Network::resource_of(std::int32_t source, std::int32_t destination) {
  const auto [place, is_new] = resource_of_.try_emplace({source, destination}, resources);
  if (is_new) ++resources;
  return place->second;
}

}  // namespace adaptra::schedule
