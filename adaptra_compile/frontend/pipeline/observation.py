"""What a pipeline shows of itself: its plan, events, times, tables and traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from adaptra.errors import PipelineError
from adaptra.frontend.pipeline.held_session import HeldSession
from adaptra.frontend.planned.activation_memory import predicted_peaks
from adaptra.frontend.planned.given_routes import changed_buffers
from adaptra.frontend.shapes.shapes import PipelineShape
from adaptra.planning.explaining.explanation import explain
from adaptra.report import drawing, perfetto, picture
from adaptra.report.files import check_suffix
from adaptra.report.stage_table import PADDED, MeasuredStep, measured_lines, stage_table
from adaptra.runtime.control.plans.events import ControlEvent
from adaptra.runtime.measuring.reduces import StageReduce
from adaptra.runtime.measuring.step_norms import NoiseOfStages
from adaptra.runtime.worker.ends.x_order import XOrderSteps
from adaptra.runtime.worker.worker import Worker
from adaptra.simulation.cost import CostModel
from adaptra.simulation.job import alike_case
from adaptra.simulation.simulate import simulate
from adaptra.simulation.standing_out import slow_edges_of, slow_in
from adaptra.simulation.timeline import Timeline


class ObservationMethods(HeldSession):
    """What is measured, decided and drawn. It changes nothing."""

    @property
    def events(self) -> tuple[ControlEvent, ...]:
        """The controller's events in this process: detections, proposals and switches, oldest first.

        Events before a change of roles or of the split are included. Under torchrun the rank of the first stage coordinates
        and has most of the events.
        """
        return self._require().workers[0].controller.events

    @property
    def shapes(self) -> tuple[PipelineShape, ...]:
        """The shapes of batches that are compiled: that of the example, then others, the most recently used last.

        Each has the sizes of its tensors, the rows of its microbatches, the seconds of its compilation and the number of its
        steps and evaluations. ``Options(shapes=…)`` limits how many are kept.
        """
        return self._require().batches.shapes.listed()

    @property
    def slow_edges(self) -> tuple[tuple[int, int], ...]:
        """The directed edges (sending stage, receiving stage) on which a message takes over F / 10.

        On the rank of the first stage that is by the times measured last. Other ranks know those for which the plan was made.
        """
        cost = self._known_cost
        limit = sum(cost.forward) / cost.stages / 10
        edges = range(cost.stages - 1)
        forward = [(i, i + 1) for i in edges if cost.latency_forward[i] + cost.occupancy_forward[i] > limit]
        backward = [(i + 1, i) for i in edges if cost.latency_backward[i] + cost.occupancy_backward[i] > limit]
        return tuple(sorted(forward + backward))

    @property
    def reduces(self) -> tuple[StageReduce, ...]:
        """REDUCE of the last step but one: the sum over the replicas of each stage's gradients. Empty without other replicas.

        Each entry has the seconds that the sum took, and the bytes of its gradients. ``exposed`` are the seconds by which it
        delayed its rank's next step, and ``hidden`` the others. So a step's sum is known once the next step has ended.

        Both are None where ranks have waited for each other between these two steps, as in ``eval_step`` or
        ``clip_grad_norm_``.

        Under torchrun the rank of the first stage coordinates, and gets an entry for every stage once all ranks have reported.
        That is soon after the step. Other ranks have those of their own stages.
        """
        workers = self._require().workers
        return next((worker.last.reduces for worker in workers if worker.controller.coordinates), workers[0].last.reduces)

    @property
    def noise_scales(self) -> tuple[NoiseOfStages, ...]:
        """The gradient noise scale of the stages of each rank of this process; empty without ``Options(noise_scale=True)``.

        Each has an ``estimate`` with its interval, in samples. These are rows of the batch, or with ``reduction="weighted"``
        units of weight. It looks back about 100 steps. Of a step that adds to the gradients of earlier ones nothing is known,
        and it counts as skipped.

        That of the whole model is in the norms of all stages: ``adaptra modes RUN`` adds them up from the run's telemetry.
        One replica alone measures none.
        """
        found = [worker.last.noise for worker in self._require().workers]
        return tuple(one for one in found if one is not None)

    def explain(self, *, equations: bool = False) -> str:
        """Explain the plan: its period and makespan, what limits it and what would help; with ``equations`` also the equations.

        The period counts: the time of a step among others in a row. Once ranks are seen to meet between steps, as in
        ``clip_grad_norm_``, the makespan counts. A table shows it for less and for more memory.

        The first line says which times are meant. On the rank of the first stage they are those measured last, also where no
        plan was made for them. Other ranks know those for which the plan was made.

        If the bandwidth of an edge limits the step, no order of ops hides it. Then the text gives the savings by more
        connections, rounding or another cut point, and the limit that would remain.

        With several replicas the text says which microbatches no other replica would compute, and why. With
        ``Reduce(algorithm="auto")`` or a sharded optimizer it says how gradients are added, and why. With ``adaptra.Local``
        it says how sites exchange, and how often they have. With ``adaptra.XOrder`` it says how far this replica is, with
        ``adaptra.Stealing`` how many microbatches have changed hands, and with ``adaptra.Deadline`` how many are deferred. The
        last change of synchronisation is named. It ends with the last measured REDUCE, see :attr:`reduces`, and the noise scale
        where it is measured, see :attr:`noise_scales`.
        """
        alone = "".join(f"{line}\n" for line in self._require().alone)
        measured = "".join(f"last measured REDUCE, {one}\n" for one in self.reduces)
        how = self._require().workers[0].how_gradients_are_added
        chosen = "" if how is None else f"gradients of this rank: {how}\n"
        noise = "".join(f"noise scale of this rank's gradients: {one}\n" for one in self.noise_scales)
        worker, changed = self._require().workers[0], self._require().synchrony.last
        sites = "" if changed is None else f"synchrony: {changed}\n"
        sites += "".join(f"{mode}\n" for mode in (worker.updates.apart, worker.updates.tail) if mode is not None)
        return self._explain_plan(equations) + alone + sites + chosen + measured + noise

    @property
    def _known_cost(self) -> CostModel:
        """The costs measured last where they are known, else those for which the plan was made."""
        measured = self._require().workers[0].controller.measured_cost
        return self.plan.case.cost if measured is None else measured

    def _explain_plan(self, equations: bool) -> str:
        plan, bandwidth, cost = self.plan, self._require().bandwidth, self._known_cost
        what = "for which it was made" if cost == plan.case.cost else "measured last, which differ from those it was made for"
        which = f"plan {plan.version}, in the times {what}\n"
        case = replace(plan.case, cost=cost)
        if not plan.program.is_one_pipeline:
            case = alike_case(plan.program, cost, changing=changed_buffers(self._require().compiled))
        explanation = explain(
            plan.program, case, bandwidth=bandwidth, spread=plan.delegated, rounded=plan.rounded, unit="seconds"
        )
        difference = self._require().compiled.difference
        return which + ("" if difference is None else f"{difference}\n") + explanation.text(equations=equations)

    @property
    def last_step(self) -> MeasuredStep | None:
        """The measured time of the last step and the size of its batch; None if these stages have run no step yet.

        The time is that of the ranks of this process, so it differs a little between ranks. The batch is that of this replica.
        """
        first, *others = self._require().workers
        if not first.monitor.kept:
            return None
        records = first.monitor.kept[-1]
        # After a failed step the others' last one may be another.
        same = [records, *(one for worker in others for one in worker.monitor.kept if one.step == records.step)]
        seconds = max(one.end for one in same) - min(one.start for one in same)
        tokens, counted_in = first.last.tokens or (None, None)
        return MeasuredStep(first.numbers.steps_before + records.step, seconds, first.last.samples, tokens, counted_in)

    def report(self) -> str:
        """Return a table of the stages with their FLOPs, parameters, activations, peak memory and messages.

        Below it stand the time of the last step and its tokens per second, as :attr:`last_step` has them. On the rank of the
        first stage the times of F, I and W follow, once they are measured. So the table alone is the same on every rank.
        """
        worker = self._require().workers[0]
        estimated, measured = worker.initial.case.cost, worker.controller.measured_cost
        padded = self._require().has_padded_ops
        return self._stage_table() + measured_lines(self.last_step, self.replicas, estimated, measured, padded=padded)

    def _stage_table(self) -> str:
        session = self._require()
        program, cost = self.plan.program, self.plan.case.cost
        sizes = predicted_peaks(program, session.compiled.train)
        simulated = simulate(program, cost)
        if program.is_one_pipeline:
            in_flight, workers = simulated.peak_in_flight, program.placement
        else:
            workers = tuple(worker for worker in program.routing.workers[self.replica] if worker is not None)
            in_flight = tuple(simulated.in_flight[worker] for worker in workers)
        return stage_table(session.compiled.train, program, in_flight, [sizes[worker] for worker in workers])

    def timeline(self) -> Timeline | None:
        """Return the measured timeline of the last step.

        With several replicas it is that of the whole job: a row for each worker, and ops with the replica of their microbatch.
        :func:`adaptra.simulation.worker_steps.worker_steps` condenses it to one entry per worker.

        Under torchrun all ranks of the job call this. Only the rank of worker 0 gets the timeline, the others None. That is the
        rank of replica 0 with the first stage.

        Raises:
            PipelineError: No step has run, or the pipeline is closed.
            StateError: Replicas in x-order may be at different updates.
        """
        return self._timeline("timeline")

    def _timeline(self, call: str) -> Timeline | None:
        session = self._require()
        session.local.require_running()
        if self._losses is None or not session.workers[0].monitor.kept:
            raise PipelineError("no step has run yet: a timeline shows the last step")
        if isinstance(order := session.workers[0].updates.apart, XOrderSteps):
            order.require_equal(call)  # a replica that is behind would wait for updates of those that wait here
        return session.local.on_every_rank(Worker.timeline, call)[0]

    def save_trace(self, path: str | Path) -> None:
        """Write the measured last step as a trace for Perfetto (.json) or a picture (.svg, .png).

        Edges are marked whose messages were slow in this step: over F / 10, and in :attr:`slow_edges` or over twice the usual.

        With several replicas it shows the whole job: a row for each worker, and microbatches in the colour of their home.

        Under torchrun all ranks call this; the rank of worker 0 writes, as :meth:`timeline` says.

        Raises:
            ReportError: The suffix is unknown, or the folder does not exist.
            PipelineError, StateError: As :meth:`timeline`.
            MissingExtraError: A picture needs matplotlib, which is not installed. The text says what to install.
        """
        suffix = check_suffix(path, (".json", *drawing.SUFFIXES))
        timeline = self._timeline("save_trace")
        if timeline is None:
            return
        slow = slow_in(timeline, self.slow_edges) | {*slow_edges_of(timeline)}
        named = [(f"step under plan {self.plan.version}{f'; {PADDED}' if self.session.has_padded_ops else ''}", timeline)]
        if suffix == ".json":
            perfetto.write(named, path, slow)
        else:
            picture.draw(named, path, slow_edges=slow)
