"""What a transport promises about a message, in the three facts that decide where SEND and RECV stand in a program.

A transport states its contract; the pass ``insert-comm`` is the only reader. It lies apart from the transports themselves so
that planning needs neither torch nor a transport.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contract:
    """How messages of one transport behave.

    Attributes:
        send_waits_for_receiver: A message starts to travel only once its receive is posted (a rendezvous: gloo, RDMA reads).
            A receive posted late then costs a second latency, so receives are posted ahead.
        in_order: All that one pair of ranks exchanges, both directions, shares one queue in the order posted (a NCCL
            communicator's stream). A receive posted early then holds up the sends behind it, so receives are posted late. False
            where each direction has a queue of its own, or none.
        buffered: A sent tensor may be overwritten as soon as SEND returns. Where this is false, its buffer is in use until the
            transport says that it is sent.
    """

    send_waits_for_receiver: bool
    in_order: bool
    buffered: bool
