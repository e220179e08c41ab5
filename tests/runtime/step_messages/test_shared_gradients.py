"""Gradients add up as autograd adds them, also where several stages share a parameter, and nobody waits before the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adaptra.errors import TransportError
from adaptra.runtime.data_parallel.accumulators import Accumulators
from adaptra.runtime.step_messages.shared_gradients import POSTED_AHEAD, AwayFromHome, Gradients, SharedParameter
from adaptra.runtime.transports.base import Identity, Pending
from adaptra.runtime.transports.local import LocalHub, LocalTransport

TIED = SharedParameter("tied", stages=(0, 1, 2), owner=0, order=(2, 1, 0))


def parameter(size: int = 1) -> nn.Parameter:
    return nn.Parameter(torch.zeros(size))


class Job:
    """Ranks with the gradients of their parameters, by default with the stage of the same number each."""

    def __init__(
        self,
        names: Sequence[Sequence[str]],
        shared: Sequence[SharedParameter],
        microbatches: int,
        timeout: float = 5.0,
        placement: Sequence[int] | None = None,
    ) -> None:
        self.placement = placement or range(len(names))
        hub = LocalHub(len(names))
        self.transports: list[LocalTransport] = [hub.transport(rank) for rank in range(len(names))]
        self.parameters = [{name: parameter() for name in of_stage} for of_stage in names]
        self.sums = [Accumulators(of_stage) for of_stage in self.parameters]
        self.stages = [
            Gradients(stage, self.sums[stage], shared, self.placement, transport, timeout)
            for stage, transport in enumerate(self.transports)
        ]
        for gradients, transport in zip(self.stages, self.transports, strict=True):
            transport.reserve(gradients.receive_counts())

    def begin(self, step: int) -> None:
        for gradients, sums in zip(self.stages, self.sums, strict=True):
            sums.begin_step()
            gradients.begin_step(step)

    def weight_grad(self, stage: int, microbatch: int, **values: float | Sequence[float]) -> None:
        """What W of a stage does, given the gradients of its parameters, of some several."""
        on_rank = self.stages[self.placement[stage]]
        for name, given in values.items():
            for value in given if isinstance(given, Sequence) else [given]:
                on_rank.add(stage, name, microbatch, torch.tensor([value]))
        on_rank.end_microbatch(stage, microbatch)

    def end(self) -> None:
        """The owner's end first: the others wait for it, and here all are one thread."""
        for gradients, sums in zip(self.stages, self.sums, strict=True):
            gradients.end_step()
            sums.fill()

    def so_far(self, name: str) -> list[float]:
        """The sums of every copy in the step that is under way."""
        return [sums.total(name).item() for sums in self.sums if name in sums.parameters]

    def gradients(self, name: str) -> list[float]:
        """Of every copy."""
        found = [of_stage[name].grad for of_stage in self.parameters if name in of_stage]
        return [gradient.item() for gradient in found if gradient is not None]


def total(*values: float) -> float:
    """The sum from left to right, rounded to fp32 after each."""
    result = torch.tensor(values[0])
    for value in values[1:]:
        result = result + torch.tensor(value)
    return result.item()


def test_gradients_add_up_in_microbatch_order_as_autograd_adds_them() -> None:
    values = [1e8, 1.0, -1e8, 1.0]
    weight = parameter()
    for value in values:
        (weight * value).sum().backward()
    job = Job([["weight"]], [], 4)
    job.begin(0)
    for microbatch, value in enumerate(values):
        job.weight_grad(0, microbatch, weight=value)
    job.end()
    assert weight.grad is not None
    assert job.gradients("weight") == [weight.grad.item()] == [1.0]


def test_a_shared_parameter_adds_its_uses_latest_first_and_then_the_microbatches() -> None:
    """Each order gives another sum in fp32, and autograd's is the one; it is on every copy."""
    uses = [(1.0, 1e8, -1e8), (0.25, 0.5, 2.0)]  # per microbatch, of stages 0, 1, 2
    weight = parameter()
    for first, second, third in uses:
        used = (weight * first, weight * second, weight * third)
        sum(one.sum() for one in used).backward()  # type: ignore[union-attr]  # a sum of tensors is a tensor
    job = Job([["tied"]] * 3, [TIED], 2)
    job.begin(0)
    for microbatch, values in enumerate(uses):
        for stage in (2, 1, 0):
            job.weight_grad(stage, microbatch, tied=values[stage])
    job.end()
    expected = total(total(-1e8, 1e8, 1.0), total(2.0, 0.5, 0.25))
    assert weight.grad is not None
    assert job.gradients("tied") == [expected] * 3 == [weight.grad.item()] * 3
    assert expected != total(total(1.0, 1e8, -1e8), total(0.25, 0.5, 2.0))


def test_a_stage_may_use_a_shared_parameter_several_times_or_not_at_all() -> None:
    """Each use is added to the sum of all later ones, on whichever stage they are; a copy without a use gets the sum too."""
    uses = [(1.0, 1e8, 0.25, -1e8, 0.5), (1e8, 1.0, -1e8, 3.0, 0.1)]  # per microbatch, in the order of execution
    weight, other = parameter(), parameter()
    for of_microbatch in uses:
        used = [weight * value for value in of_microbatch]
        (sum(one.sum() for one in used) + (other * 2.0).sum()).backward()  # type: ignore[union-attr]  # as above
    tied = SharedParameter("tied", (0, 1, 2, 3), 0, (3, 2, 2, 0, 0))
    job = Job([["tied"], ["tied"], ["tied", "other"], ["other", "tied"]], [tied, SharedParameter("other", (2, 3), 2, (3,))], 2)
    job.begin(0)
    for microbatch, (first, second, third, fourth, fifth) in enumerate(uses):
        job.weight_grad(3, microbatch, other=2.0, tied=fifth)
        job.weight_grad(2, microbatch, tied=(fourth, third))
        job.weight_grad(1, microbatch)
        job.weight_grad(0, microbatch, tied=(second, first))
    job.end()
    assert weight.grad is not None and other.grad is not None
    assert job.gradients("tied") == [weight.grad.item()] * 4
    assert job.gradients("other") == [other.grad.item()] * 2
    assert weight.grad.item() != total(*(total(fifth, total(d, c), total(b, a)) for a, b, c, d, fifth in uses))


def test_contributions_may_come_in_any_order_of_the_stages() -> None:
    """The sum does not depend on who is first."""
    found = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1]):
        job = Job([["tied"]] * 3, [TIED], 3)
        job.begin(0)
        for stage in order:
            for microbatch in range(3):
                job.weight_grad(stage, microbatch, tied=[0.1, 1e7, 0.3][stage] * (microbatch + 1))
        job.end()
        found.append(job.gradients("tied"))
    assert len({tuple(one) for one in found}) == 1


def test_the_owner_waits_for_nobody_before_the_end_and_posts_few_receives() -> None:
    """No other stage has run W; the owner runs all of its own, and has buffers for ``POSTED_AHEAD`` microbatches only."""
    job = Job([["tied"], ["tied"]], [SharedParameter("tied", (0, 1), 0, (1, 0))], 6)
    ((_, buffers),) = job.stages[0].receive_counts().items()
    assert buffers == POSTED_AHEAD < 6
    job.begin(0)
    for microbatch in range(6):
        job.weight_grad(0, microbatch, tied=1.0)
    assert job.so_far("tied") == [0.0, 0.0]
    for microbatch in range(6):
        job.weight_grad(1, microbatch, tied=10.0)
    job.end()
    assert job.gradients("tied") == [66.0, 66.0]


def test_sums_are_taken_as_contributions_come() -> None:
    """So that the end of the step has little left to do."""
    job = Job([["tied"], ["tied"]], [SharedParameter("tied", (0, 1), 0, (1, 0))], 3)
    job.begin(0)
    for microbatch in range(3):
        job.weight_grad(1, microbatch, tied=10.0)
        job.weight_grad(0, microbatch, tied=1.0)
        assert job.so_far("tied") == [11.0 * (microbatch + 1), 0.0]


def test_shared_gradients_add_up_over_steps_until_they_are_zeroed() -> None:
    job = Job([["tied"], ["tied"]], [SharedParameter("tied", (0, 1), 0, (1, 0))], 1)
    for step, expected in enumerate([3.0, 6.0]):
        job.begin(step)
        job.weight_grad(0, 0, tied=1.0)
        job.weight_grad(1, 0, tied=2.0)
        job.end()
        assert job.gradients("tied") == [expected] * 2
    for of_stage in job.parameters:
        of_stage["tied"].grad = None
    job.begin(2)
    job.weight_grad(0, 0, tied=1.0)
    job.weight_grad(1, 0, tied=2.0)
    job.end()
    assert job.gradients("tied") == [3.0] * 2


def test_a_contribution_is_the_value_at_the_end_of_its_w() -> None:
    """W's buffers are used again before the end of the step, on the owner and on the others."""
    job = Job([["tied"], ["tied"]], [SharedParameter("tied", (0, 1), 0, (1, 0))], 1)
    job.begin(0)
    buffers = [torch.ones(1), torch.ones(1)]
    for stage in (0, 1):
        job.stages[stage].add(stage, "tied", 0, buffers[stage])
        job.stages[stage].end_microbatch(stage, 0)
    for buffer in buffers:
        buffer.fill_(100.0)
    job.end()
    assert job.gradients("tied") == [2.0, 2.0]


def test_a_sum_is_the_value_at_the_end_of_the_owners_step() -> None:
    """The owner's gradient is averaged over replicas or clipped in place while the sum may still be on its way."""
    job = Job([["tied"]] * 3, [TIED], 1)
    job.begin(0)
    for stage in (2, 1, 0):
        job.weight_grad(stage, 0, tied=1.0)
    job.stages[0].end_step()
    averaged = job.sums[0].total("tied")
    assert averaged.item() == 3.0
    averaged.fill_(7.0)
    for copy in job.stages[1:]:
        copy.end_step()
    assert job.so_far("tied") == [7.0, 3.0, 3.0]


def test_several_shared_parameters_of_two_stages_travel_together_and_own_ones_stay() -> None:
    """One message per pair of stages and microbatch, and a parameter of two stages goes to those two only."""
    shared = [
        SharedParameter("a", (0, 2), 0, (2, 0)),
        SharedParameter("b", (0, 2), 0, (2, 0)),
        SharedParameter("c", (1, 2), 1, (2, 1)),
    ]
    job = Job([["a", "b", "own"], ["c"], ["a", "b", "c"]], shared, 2)
    assert [len(counts) for counts in (one.receive_counts() for one in job.stages)] == [1, 1, 2]
    ((source, specs),) = job.stages[0].receive_counts()
    assert (source, len(specs)) == (2, 2)
    job.begin(0)
    for microbatch in range(2):
        job.weight_grad(2, microbatch, a=1.0, b=2.0, c=3.0)
        job.weight_grad(1, microbatch, c=30.0)
        job.weight_grad(0, microbatch, a=10.0, b=20.0, own=5.0)
    job.end()
    assert (job.gradients("a"), job.gradients("b"), job.gradients("c")) == ([22.0] * 2, [44.0] * 2, [66.0] * 2)
    assert job.gradients("own") == [10.0]


@pytest.mark.parametrize("waits", [(3, 3, 1, 1, 2, 2, 0, 0), (3, 1, 3, 2, 0, 2, 1, 0), (1, 1, 3, 2, 3, 2, 0, 0)])
def test_stages_of_a_rank_contribute_in_one_message_a_microbatch(waits: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of W, messages are received in the order of their sends, and added in autograd's order."""
    shared = [SharedParameter("a", (0, 1, 2, 3), 0, (3, 2, 3, 1, 0)), SharedParameter("b", (1, 2, 3), 1, (3, 2, 1))]
    job = Job([["a", "b"], ["a", "b"]], shared, 2, placement=(0, 1, 0, 1))
    sent, received = dict[object, list[object]](), dict[object, list[object]]()
    for transport in job.transports:
        send, receive, rank = transport.send, transport.receive, transport.rank

        def sending(to: int, identity: Identity, tensors: Sequence[Tensor], *, send: Any = send, rank: int = rank) -> Pending:
            sent.setdefault((rank, to, identity.channel), []).append(identity.key)
            return send(to, identity, tensors)

        def receiving(source: int, identity: Identity, *, receive: Any = receive, rank: int = rank) -> Pending:
            received.setdefault((source, rank, identity.channel), []).append(identity.key)
            return receive(source, identity)

        monkeypatch.setattr(transport, "send", sending)
        monkeypatch.setattr(transport, "receive", receiving)
    values: dict[int, dict[str, float | Sequence[float]]] = {
        0: {"a": 1e-8}, 1: {"a": 1.0, "b": 5.0}, 2: {"a": 1e8, "b": 1e-8}, 3: {"a": [-1e8, 3.0], "b": -5.0}
    }  # fmt: skip
    job.begin(0)
    done = dict.fromkeys(values, 0)
    for stage in waits:
        job.weight_grad(stage, done[stage], **values[stage])
        done[stage] += 1
    with ThreadPoolExecutor(2) as threads:  # each owner waits for the other rank
        list(threads.map(lambda one: one.end_step(), job.stages))
    for sums in job.sums:
        sums.fill()
    assert sent == received and {len(keys) for keys in sent.values()} == {3}
    once = total(-1e8, 1e8, 3.0, 1.0, 1e-8)
    assert job.gradients("a") == [total(once, once)] * 2
    assert job.gradients("b") == [total(*[total(-5.0, 1e-8, 5.0)] * 2)] * 2


def test_an_interrupted_step_leaves_nothing_behind() -> None:
    job = Job([["tied"], ["tied"]], [SharedParameter("tied", (0, 1), 0, (1, 0))], 2)
    job.begin(0)
    job.weight_grad(1, 0, tied=50.0)
    job.stages[0].add(0, "tied", 0, torch.tensor([100.0]))
    job.begin(1)
    for microbatch in range(2):
        job.weight_grad(1, microbatch, tied=2.0)
        job.weight_grad(0, microbatch, tied=1.0)
    job.end()
    assert job.gradients("tied") == [6.0, 6.0]


def test_a_contribution_that_never_comes_is_named() -> None:
    job = Job([["tied"], ["tied"]], [SharedParameter("tied", (0, 1), 0, (1, 0))], 2, timeout=0.01)
    job.begin(4)
    for microbatch in range(2):
        job.weight_grad(0, microbatch, tied=1.0)
    job.weight_grad(1, 0, tied=1.0)
    with pytest.raises(
        TransportError,
        match=r"shared gradient of microbatch 1 of step 4 on edge 1→0 with float32\[1\]: not exchanged within 0.01 s",
    ):
        job.end()


def test_bf16_sums_are_rounded_as_autograd_rounds_them() -> None:
    """After every addition, not once at the end."""
    values = [1.0] + [1 / 256] * 8
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    for value in values:
        (weight * value).sum().backward()
    mine = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    sums = Accumulators({"weight": mine})
    gradients = Gradients(0, sums, [], (0,), LocalHub(1).transport(0), 1.0)
    gradients.begin_step(0)
    for microbatch, value in enumerate(values):
        gradients.add(0, "weight", microbatch, torch.tensor([value], dtype=torch.bfloat16))
        gradients.end_microbatch(0, microbatch)
    gradients.end_step()
    sums.fill()
    found: Tensor | None = mine.grad
    assert found is not None and weight.grad is not None
    assert torch.equal(found, weight.grad) and found.item() == 1.0


def test_contributions_from_workers_of_another_replica_are_added_at_home_in_the_same_order() -> None:
    """Workers 0 and 1 compute two microbatches of the replica that has workers 2 and 3, of both stages. Each stage has one."""
    tied = SharedParameter("tied", (0, 1), 0, (1, 0, 0))
    uses = [(1e8, 1.0, -1e8), (0.25, 3.0, 0.1), (7.0, -1e8, 1e8)]  # per microbatch, of stage 1 once and of stage 0 twice
    plain = Job([["tied"]] * 2, [tied], 3)
    plain.begin(0)
    for microbatch, (of_last, *of_first) in enumerate(uses):
        plain.weight_grad(1, microbatch, tied=of_last)
        plain.weight_grad(0, microbatch, tied=of_first)
    plain.end()

    hub = LocalHub(4)
    transports = [hub.transport(rank) for rank in range(4)]
    sums = [Accumulators({"tied": parameter()}) for _ in range(4)]
    foreign = [Gradients(one, sums[one], [tied], (2, 3), transports[one], 5.0, foreign=(1, one)) for one in (0, 1)]
    home = [Gradients(one, sums[one], [tied], (2, 3), transports[one], 5.0) for one in (2, 3)]
    workers = {(0, 1): 0, (0, 2): 0, (1, 0): 1, (1, 1): 1}
    away = AwayFromHome(1, workers, transports[2])
    for gradients, transport in zip(home, transports[2:], strict=True):
        transport.reserve(Counter(gradients.receive_counts()) + gradients.receive_counts_of(away))
        gradients.begin_step(0, away)
    for gradients in foreign:
        gradients.begin_step(0)
    for stage in (0, 1):  # the owner is through before the first contribution to it leaves
        for microbatch, (of_last, *of_first) in enumerate(uses):
            one = foreign[stage] if (stage, microbatch) in workers else home[stage]
            for value in [of_last] if stage == 1 else of_first:
                one.add(stage, "tied", microbatch, torch.tensor([value]))
            one.end_microbatch(stage, microbatch)
    for gradients in home:
        gradients.end_step()
    assert [sums[rank].take("tied") for rank in (2, 3)] == plain.gradients("tied")
    assert [sums[rank].take("tied") for rank in (0, 1)] == [None, None]
