#!/bin/bash
# hosts.sh N R: N hosts with R RDMA devices each, inside the lab's kernel.
#
# Host i is the network namespace n<i>. Its interface rail<r>, 10.9.<r>.<i+1>, carries the soft-RoCE device rxe<i>_<r>; its interface
# ctl is 10.8.0.<i+1>, for what is not RDMA. All interfaces of a rail are plugged into one switch (a bridge here, in the first
# namespace), whose end of the cable is p<i>_<r>; so `ip link set p0_1 down` pulls host 0's second cable, and
# `tc qdisc add dev p0_1 root netem …` disturbs it.
set -e
hosts=$1 rails=$2

switch() {
  ip link add "$1" type bridge
  ip link set "$1" mtu 4200 up
}

# cable SWITCH PLUG HOST INTERFACE ADDRESS; room for RoCE's largest packets of 4096 bytes
cable() {
  ip link add "$2" mtu 4200 type veth peer name "$4" mtu 4200 netns "$3"
  ip link set "$2" master "$1" up
  ip -n "$3" address add "$5/24" dev "$4"
  ip -n "$3" link set "$4" up
}

ip link set lo up
switch control
for ((rail = 0; rail < rails; rail++)); do switch "rail$rail"; done
for ((host = 0; host < hosts; host++)); do
  ip netns add "n$host"
  ip -n "n$host" link set lo up
  cable control "c$host" "n$host" ctl "10.8.0.$((host + 1))"
  for ((rail = 0; rail < rails; rail++)); do
    cable "rail$rail" "p${host}_$rail" "n$host" "rail$rail" "10.9.$rail.$((host + 1))"
    ip netns exec "n$host" rdma link add "rxe${host}_$rail" type rxe netdev "rail$rail"
  done
done
