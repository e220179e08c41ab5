"""The contract of a transport: facts about messages that decide the positions of SEND and RECV in a program.

Each transport states its contract, which the pass ``insert-comm`` reads. It is separate from the transports, so that planning
needs neither torch nor a transport.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contract:
    """Behaviour of messages of one transport.

    Attributes:
        send_waits_for_receiver: Whether a message is sent only once its receive is posted (a rendezvous: gloo, RDMA reads).
            A late receive then costs a second latency, so receives are posted ahead.
        in_order: Whether all messages of a pair of ranks, in both directions, share one queue in the order posted (a NCCL
            communicator's stream). An early receive then delays the sends after it, so receives are posted late. False if
            each direction has its own queue, or none.
        one_way: Whether each channel has a queue of its own although messages are ``in_order``. Without that, ranks with
            several stages would wait for each other, since they send both ways in each class of channels.
    """

    send_waits_for_receiver: bool
    in_order: bool
    one_way: bool = False
