"""The executor does what its program says, and waits only for the message of the op at hand (rule 2)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from pair_of_stages import PAIR, SOON, SPEC, Doubling, batch, executor_of, lowered
from strategies import programs
from torch import Tensor

from adaptra.errors import TransportError
from adaptra.graph.ops.specs import MessageSpec
from adaptra.passes.insert_comm import InsertComm
from adaptra.passes.lower_comm import LowerComm
from adaptra.program import Program
from adaptra.program.schedules import forward_only, generate
from adaptra.runtime.transports.base import Identity, LaneTraffic, Purpose, Transport
from adaptra.runtime.transports.local import LocalHub, LocalTransport
from adaptra.simulation.cost import CostModel


def forward(microbatch: int, source: int, step: int = 0) -> Identity:
    return Identity(step, Purpose.ACTIVATION, source, source + 1, microbatch, SPEC)


def backward(microbatch: int, source: int, step: int = 0) -> Identity:
    return Identity(step, Purpose.GRADIENT, source, source - 1, microbatch, SPEC)


class Beside:
    """One rank's executor on a thread of its own; the test plays the other ranks."""

    def __init__(self, program: Program, rank: int) -> None:
        hub = LocalHub(program.ranks)
        self.peers = {other: hub.transport(other) for other in range(program.ranks) if other != rank}
        self.transport: LocalTransport = hub.transport(rank)
        self.stage = Doubling(last=rank == program.ranks - 1)
        self._executor = executor_of(program, rank, self.transport, {rank: self.stage})
        self._pool = ThreadPoolExecutor(1)
        self._run = self._pool.submit(self._executor.run, 0, batch(program.microbatches), [()] * program.microbatches)

    def send(self, identity: Identity, value: float = 1.0) -> None:
        self.peers[identity.source].send(identity.destination, identity, (torch.tensor([value]),))

    def end(self) -> None:
        self._run.result(SOON)
        self._pool.shutdown()


def test_an_op_waits_for_its_own_message_and_no_other() -> None:
    """The gradient of microbatch 0 is withheld: what does not need it runs, and what needs it waits."""
    program = lowered(
        """
        schedule withheld placement=0,1 microbatches=3
        0: 0RECV_B0 0RECV_B1 0RECV_B2 0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0I0 0W0 0I1 0W1 0I2 0W2
        1: 1RECV_F0 1F0 1I0 1SEND_B0 1W0 1RECV_F1 1F1 1I1 1SEND_B1 1W1 1RECV_F2 1F2 1I2 1SEND_B2 1W2
        """
    )
    job = Beside(program, 0)
    job.send(backward(2, 1), 3.0)
    job.send(backward(1, 1), 2.0)
    assert job.stage.has_run("F2")
    assert job.stage.ran == ["F0", "F1", "F2"]
    job.send(backward(0, 1), 1.0)
    job.end()
    assert job.stage.ran[3:] == ["I0", "W0", "I1", "W1", "I2", "W2"]
    assert job.stage.weight_gradients == [1.0, 4.0, 9.0]


def test_a_backward_op_does_not_wait_for_a_forward_message_nor_the_other_way_round() -> None:
    """In the middle of three stages: one direction of the traffic is withheld, then the other."""
    program = lowered(
        """
        schedule middle placement=0,1,2 microbatches=2
        0: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0I0 0W0 0I1 0W1
        1: 1RECV_F0 1RECV_F1 1RECV_B0 1RECV_B1 1F0 1SEND_F0 1I0 1SEND_B0 1W0 1F1 1SEND_F1 1I1 1SEND_B1 1W1
        2: 2RECV_F0 2RECV_F1 2F0 2I0 2SEND_B0 2W0 2F1 2I1 2SEND_B1 2W1
        """
    )
    job = Beside(program, 1)
    job.send(forward(0, 0), 5.0)
    job.send(backward(0, 2))
    # Microbatch 1's forward message is withheld.
    assert job.stage.has_run("W0")
    assert job.stage.ran == ["F0", "I0", "W0"]
    job.send(forward(1, 0), 6.0)
    # Now its gradient is.
    assert job.stage.has_run("F1")
    assert job.stage.ran == ["F0", "I0", "W0", "F1"]
    job.send(backward(1, 2))
    job.end()
    assert job.stage.weight_gradients == [5.0, 6.0]


def test_a_weight_gradient_waits_for_no_message() -> None:
    program = lowered(
        """
        schedule late placement=0,1 microbatches=2
        0: 0RECV_B0 0RECV_B1 0F0 0SEND_F0 0F1 0SEND_F1 0I0 0W0 0I1 0W1
        1: 1RECV_F0 1F0 1I0 1SEND_B0 1RECV_F1 1F1 1I1 1SEND_B1 1W0 1W1
        """
    )
    job = Beside(program, 1)
    job.send(forward(0, 0))
    assert job.stage.has_run("I0")
    job.send(forward(1, 0))
    job.end()
    assert job.stage.ran == ["F0", "I0", "F1", "I1", "W0", "W1"]
    job = Beside(program, 0)
    job.send(backward(0, 1))
    assert job.stage.has_run("W0")
    assert "I1" not in job.stage.ran
    job.send(backward(1, 1))
    job.end()


def test_an_error_says_rank_op_and_step() -> None:
    """What the user's model raises stays what it is."""
    stage = Doubling(fail_at="F1")
    executor = executor_of(lowered(PAIR), 0, LocalHub(2).transport(0), {0: stage})
    with pytest.raises(ZeroDivisionError, match="division by zero in the user's model") as caught:
        executor.run(7, batch(2), [()] * 2)
    assert caught.value.__notes__ == ["in step 7: rank 0 at 0F1"]


def test_a_message_that_does_not_come_in_time_is_named() -> None:
    executor = executor_of(lowered(PAIR), 1, LocalHub(2).transport(1), {1: Doubling(last=True)}, timeout=0.01)
    with pytest.raises(
        TransportError, match=r"0SEND_F0 of step 3 on edge 0→1 with float32\[1\]: not exchanged within 0.01 s"
    ) as caught:
        executor.run(3, [], [()] * 2)
    assert caught.value.__notes__ == ["in step 3: rank 1 at 1F0"]


def test_a_message_of_another_step_is_never_taken() -> None:
    hub = LocalHub(2)
    executor = executor_of(lowered(PAIR), 1, hub.transport(1), {1: Doubling(last=True)}, timeout=0.01)
    hub.transport(0).send(1, forward(0, 0, step=4), (torch.ones(1),))
    with pytest.raises(TransportError, match="0SEND_F0 of step 3"):
        executor.run(3, [], [()] * 2)


def run_all(program: Program, transports: Sequence[Transport], steps: int = 2) -> tuple[list[Tensor], dict[int, Doubling]]:
    """All ranks on threads; the last step's results by microbatch, and the stages."""
    stages = {stage: Doubling(last=stage == program.stages - 1) for stage in range(program.stages)}
    executors = [
        executor_of(program, rank, transport, {s: stages[s] for s in stages if program.placement[s] == rank})
        for rank, transport in enumerate(transports)
    ]
    targets = [(torch.tensor([0.5 * microbatch]),) for microbatch in range(program.microbatches)]
    found: dict[int, tuple[Tensor, ...]] = {}
    with ThreadPoolExecutor(program.ranks) as pool:
        for step in range(steps):
            runs = [pool.submit(executor.run, step, batch(program.microbatches), targets) for executor in executors]
            found = {microbatch: result for run in runs for microbatch, result in run.result(SOON).items()}
    return [found[microbatch][0] for microbatch in range(program.microbatches)], stages


@settings(max_examples=60)
@given(programs(lowered=False))
def test_any_valid_program_is_executed_with_the_buffers_it_asked_for(program: Program) -> None:
    """Any placement, several stages on a rank too: the ops of each rank in its order, and the numbers are right."""
    hub = LocalHub(program.ranks)
    transports = [hub.transport(rank) for rank in range(program.ranks)]
    cost = CostModel.uniform(program.stages, 1.0, 1.0, 1.0)
    communicating = InsertComm.for_contract(transports[0].contract).apply(program, cost)
    results, stages = run_all(communicating, transports)
    count, last = program.microbatches, program.stages - 1
    assert [one.item() for one in results] == [2.0**program.stages * (k + 1) + 0.5 * k for k in range(count)]
    for index, stage in stages.items():
        gradient = 2.0 ** (last - index)
        assert stage.weight_gradients == [2.0**index * (k + 1) * gradient for k in range(count)] * 2


@pytest.mark.parametrize("index", [0, 1])
def test_a_program_takes_no_fewer_buffers_than_it_asks_for(index: int) -> None:
    """One less for either neighbour, and a receive finds none: the number is exact."""
    program = lowered(
        """
        schedule exact placement=0,1,2 microbatches=3
        0: 0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0I0 0W0 0RECV_B1 0I1 0W1 0RECV_B2 0I2 0W2
        1: 1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 1RECV_B0 1I0 1SEND_B0 1W0 1RECV_F2 1F2 1SEND_F2 1RECV_B1 1I1 1SEND_B1 """
        """1RECV_B2 1I2 1SEND_B2 1W1 1W2
        2: 2RECV_F0 2F0 2I0 2SEND_B0 2W0 2RECV_F1 2F1 2I1 2SEND_B1 2W1 2RECV_F2 2F2 2I2 2SEND_B2 2W2
        """
    )
    hub = LocalHub(3)
    transport = hub.transport(1)
    executor = executor_of(program, 1, transport, {1: Doubling()})
    asked = executor.receive_counts
    assert list(asked.values()) == [2, 2]
    key = list(asked)[index]
    transport.reserve(asked | {key: asked[key] - 1})
    for microbatch in range(3):
        hub.transport(0).send(1, forward(microbatch, 0), (torch.ones(1),))
        hub.transport(2).send(1, backward(microbatch, 2), (torch.ones(1),))
    with pytest.raises(AssertionError, match="all 1 buffers reserved"):
        executor.run(0, [], [()] * 3)


def test_receives_posted_ahead_leave_buffers_for_another_channel_from_the_same_rank() -> None:
    """Five: the inputs of 1W0, 1W1 and 3W1 when the next step's two are posted ahead; or 1W0, 1W1, these two and a gradient."""
    program = lowered(
        """
        schedule shared placement=0,1,0,1 microbatches=2
        0: 0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_B0 2I0 2SEND_B0 2W0 2RECV_B1 2I1 """
        """2SEND_B1 2W1 0RECV_B0 0I0 0W0 0RECV_B1 0I1 0W1
        1: 1RECV_F0 1RECV_F1 1F0 1SEND_F0 1F1 1SEND_F1 3RECV_F0 3F0 3I0 3SEND_B0 3W0 3RECV_F1 3F1 3I1 3SEND_B1 3W1 1RECV_B0 """
        """1I0 1SEND_B0 1W0 1RECV_B1 1I1 1SEND_B1 1W1
        """
    )
    transport = LocalHub(2).transport(1)
    executor = executor_of(program, 1, transport, {1: Doubling(), 3: Doubling(last=True)})
    assert list(executor.receive_counts.values()) == [5]


def test_an_evaluation_gives_its_buffers_back_after_each_forward() -> None:
    """One at a time, however many microbatches there are."""
    program = forward_only(range(2), 5)
    hub = LocalHub(2)
    transports = [hub.transport(0), hub.transport(1)]
    communicating = InsertComm.for_contract(transports[0].contract).apply(program, CostModel.uniform(2, 1.0, 1.0, 1.0))
    executor = executor_of(communicating, 1, transports[1], {1: Doubling(last=True)})
    assert max(executor.receive_counts.values()) < 5
    results, _ = run_all(communicating, transports)
    assert [one.item() for one in results] == [4.0 * (k + 1) + 0.5 * k for k in range(5)]


class Preparing(LocalTransport):
    """Notes for what it is to make ready."""

    def __init__(self, hub: LocalHub, rank: int) -> None:
        super().__init__(hub, rank)
        self.prepared: dict[str | None, tuple[dict[MessageSpec, int], dict[tuple[int, MessageSpec], int]]] = {}

    def prepare(self, traffic: LaneTraffic) -> None:
        self.prepared[traffic.lane] = dict(traffic.sent), dict(traffic.received)


def test_a_transport_makes_ready_for_what_a_program_has_under_way_on_each_lane() -> None:
    """In 1F1B stage s of four has 4 - s microbatches in flight: so many messages may be between it and the next stage."""
    cost = CostModel.uniform(4, 0.01, 0.01, 0.01)
    program = LowerComm(slow=((1, 2), (1, 0))).apply(InsertComm("ahead").apply(generate("1f1b", 4, 8), cost), cost)
    transport = Preparing(LocalHub(4), 1)
    executor = executor_of(program, 1, transport, {1: Doubling()})
    executor.make_ready()
    counts = executor.receive_counts
    assert transport.prepared == {
        "delegate": ({SPEC: 3 + 4}, {}),
        None: ({}, {(0, SPEC): counts[0, SPEC], (2, SPEC): counts[2, SPEC]}),
    }
