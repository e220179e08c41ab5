"""The batches of other replicas whose workers this process hosts: the process at home there sends them.

A process is given the batch of its home replica alone. As a call begins, the first process of a replica sends its batch to
those that host workers of it and are at home elsewhere. They take it as if they had been given it.

The sender does not wait for them, as they may begin the call later: the last stage may still be in the call before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from adaptra.errors import AdaptraError, BatchError, PeerLostError, PipelineError
from adaptra.frontend.arguments.call_batches import CallBatch, OfReplica
from adaptra.frontend.running.batches import Batches
from adaptra.frontend.running.local_workers import LocalWorkers, Result
from adaptra.frontend.shapes.shapes import ShapedBatch
from adaptra.graph import CompiledStages
from adaptra.runtime.exchange.state_transfer import Handover, receive, send
from adaptra.runtime.exchange.tensor_memory import why_not_movable
from adaptra.runtime.transports.process_groups import broken_peer
from adaptra.runtime.worker.worker import Worker

_INPUT = "input"
_TARGET = "target"
_CALL = "call"


class HostedBatches:
    """The batches of all workers of this process. It sends that of its home to others, and takes those of its guests.

    Args:
        local: The workers of this process.
        home: Splits the batches of the replica in which this process is at home.
        guest: Returns what splits those of another replica.
    """

    def __init__(self, local: LocalWorkers, home: Batches, guest: Callable[[int], Batches]) -> None:
        self._local = local
        self._home = home
        self._guest = guest
        self._guests: dict[int, Batches] = {}
        self._leaving: list[Callable[[], None]]
        self.begin()

    @property
    def all(self) -> tuple[Batches, ...]:
        """The batches of each replica whose workers this process hosts, those of its home first."""
        return (self._home, *self._guests.values())

    def begin(self) -> None:
        """Begin with the workers that run now, and with the shape of their stages."""
        hosted = sorted({worker.replica for worker in self._local.workers} - {self._local.launched.replica})
        self._guests = {replica: self._guests.get(replica) or self._guest(replica) for replica in hosted}
        self._leaving = []  # for ranks of another world
        for batches in self.all:
            batches.begin()

    def of(
        self, call: str, home: CallBatch, of_replica: OfReplica | None, *, with_loss: bool, training: bool
    ) -> dict[int, ShapedBatch]:
        """Return the batches in microbatches by replica, and compare their rows. All processes call it.

        Args:
            call: The method of the pipeline that the user has called.
            home: What this process was given.
            of_replica: Gives the batch of any replica, so that none is sent; on all processes, or on none.
            with_loss, training: As of :meth:`.batches.Batches.of`.

        Raises:
            BatchError: This process has to send a batch, and was not given all of it. Or another one's is not one that this
                pipeline takes.
            PipelineError: The process that sends a batch has called another method.
            PeerLostError: It is lost.
        """
        launched = self._local.launched
        if launched.job.keeper is not None and not self._is_whole(home, with_loss=with_loss):
            raise BatchError(
                f"{call}: rank {launched.process} was not given its replica's whole batch: expected inputs and targets "
                "on every rank, as Options(survive=True) has each go on for others"
            )
        sends = launched.world.has_guests and of_replica is None
        arrived = self._exchanged(call, home, with_loss=with_loss) if sends else {}
        here = {launched.replica: home}
        if of_replica is not None:
            here |= {replica: of_replica(replica) for replica in self._guests}
        how = {"with_loss": with_loss, "training": training}
        # The ranks of a replica agree on new shapes. In one order of replicas on all processes, none waits in a circle.
        shaped = {
            replica: self._taken(batches, arrived[replica], **how)
            if replica in arrived
            else batches.of(here[replica].args, here[replica].targets, here[replica].kwargs, **how)
            for replica, batches in sorted({launched.replica: self._home, **self._guests}.items())
        }
        self.compare_rows(call, {replica: batch.rows for replica, batch in here.items()})
        return shaped

    def compare_rows(self, call: str, rows: Mapping[int, Mapping[str, Any]]) -> None:
        """Start a comparison of a call's rows with those of other processes' ranks.

        Args:
            call: The user's method.
            rows: By replica, what this process was given, by argument name. What another one has sent is compared there.
        """
        for batches in self.all:
            batches.compare_rows(call, rows.get(batches.replica, {}))

    def _exchanged(self, call: str, home: CallBatch, *, with_loss: bool) -> dict[int, Handover]:
        """Send this process's batch to those that need it, and return those of its guests by replica."""
        launched = self._local.launched
        is_giver = launched.world.giver(launched.replica) == launched.process
        takers = launched.world.takers(launched.replica) if is_giver else ()
        own = self._given(call, home, with_loss=with_loss) if takers else Handover()
        with self._exchanging(call):
            world = launched.world
            self._leaving = [send(own, world.number(taker), launched.everyone) for taker in takers]
            arrived = {replica: receive(world.number(world.giver(replica)), launched.everyone) for replica in self._guests}
            for replica, given in arrived.items():
                self._check_call(call, given, launched.world.giver(replica))
        return arrived

    def run(self, run: Callable[[Worker], Result], call: str, commit: Callable[[Worker], None]) -> list[Result]:
        """Run a call as :meth:`.local_workers.LocalWorkers.on_every_rank`, which has had its batches from :meth:`of`.

        Nothing is under way after it: another call may use the same group, or end it.

        Raises:
            PeerLostError: A process that had to take this one's batch is lost.
            Exception: As ``on_every_rank``.
        """

        def settle() -> None:
            if self._leaving:
                with self._exchanging(call):
                    for wait in self._leaving:
                        wait()
            self._leaving = []

        return self._local.on_every_rank(run, call, commit, settle)

    @contextmanager
    def _exchanging(self, call: str) -> Generator[None]:
        """Enclose a wait for other processes, which ends with an error once one of them is lost."""
        with self._local.called(call), self._local.changing("batch"):
            try:
                with self._local.launched.waiting():
                    yield
            except AdaptraError:
                raise
            except RuntimeError as error:
                raise self._lost(call, error) from error

    def _lost(self, call: str, error: RuntimeError) -> PeerLostError:
        """Return the loss that has ended the exchange, which names the rank if it is known."""
        launched = self._local.launched
        if launched.membership.lost is not None:
            return launched.membership.lost
        peer = broken_peer(launched.everyone)
        rank = None if peer is None else launched.world.processes[peer]
        who = "a rank" if rank is None else f"rank {rank}"
        return PeerLostError(f"{who} is lost: {call}: a batch between ranks did not arrive: {error}", rank=rank)

    @property
    def _compiled(self) -> CompiledStages:
        return self._local.compiled

    def _needs_targets(self, *, with_loss: bool) -> bool:
        return with_loss and bool(self._compiled.targets.specs)

    def _is_whole(self, batch: CallBatch, *, with_loss: bool) -> bool:
        has_targets = batch.targets is not None or not self._needs_targets(with_loss=with_loss)
        return bool(batch.args or batch.kwargs) and has_targets

    def _given(self, call: str, home: CallBatch, *, with_loss: bool) -> Handover:
        """Return this process's batch, as others take it."""
        inputs, wanted = self._compiled.inputs, self._compiled.targets
        if not self._is_whole(home, with_loss=with_loss):
            launched = self._local.launched
            takers = ", ".join(map(str, launched.world.takers(launched.replica)))
            raise BatchError(
                f"{call}: rank {launched.process} was not given the whole batch of replica {launched.replica}, some of whose "
                f"workers rank {takers} hosts: expected inputs and targets on rank {launched.process}, which sends them"
            )
        flat = {_INPUT: inputs.flatten(home.args, home.kwargs, any_size=True)}
        if self._needs_targets(with_loss=with_loss):
            flat[_TARGET] = wanted.flatten(home.targets, any_size=True)
        tensors = {(str(index), what): _movable(one) for what, of in flat.items() for index, one in enumerate(of)}
        return Handover(tensors, {(call, _CALL): None})

    def _check_call(self, call: str, given: Handover, giver: int) -> None:
        if (call, _CALL) not in given.numbers:
            ((other, _),) = given.numbers
            raise PipelineError(
                f"rank {self._local.launched.process} called {call}, rank {giver} {other}: expected the same calls in the same "
                "order on all ranks"
            )

    def _taken(self, batches: Batches, given: Handover, *, with_loss: bool, training: bool) -> ShapedBatch:
        inputs, targets = ([one for (_, what), one in given.tensors.items() if what == kind] for kind in (_INPUT, _TARGET))
        args, kwargs = self._compiled.inputs.arguments(inputs)
        whole = args, kwargs, self._compiled.targets.unflatten(targets) if with_loss else None
        return batches.of_flat(inputs, targets, whole, with_loss=with_loss, training=training)


def _movable(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if why_not_movable(tensor) is None else tensor.contiguous()
