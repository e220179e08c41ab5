"""Who computes what: roles of ranks, routes of microbatches and cut points of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adaptra.frontend.arguments.arguments import check_split
from adaptra.frontend.pipeline.attached_optimizer import given_or_attached
from adaptra.frontend.pipeline.state import StateMethods
from adaptra.planning.layouts.layout_change import RoleChange, SplitChange
from adaptra.program.roles import Roles
from adaptra.program.routing import Route, Routing


class LayoutMethods(StateMethods):
    """What shows and changes the layout of a pipeline between two steps."""

    _optimizer: torch.optim.Optimizer | None = None

    @property
    def roles(self) -> Roles | None:
        """The place in its pipeline and the data-parallel replica of each rank of the job; None if there is one replica.

        The place is the rank's stage, or its number in ``placement`` if ranks have several stages.
        """
        return self._require().launched.roles

    @property
    def workers(self) -> tuple[int, ...]:
        """The rank in the job of each worker: worker w is rank w % n of replica w // n, with n ranks in a pipeline.

        Routes and events name workers, which stay the same when ranks change roles.
        """
        launched = self._require().launched
        return tuple(range(launched.world.places)) if launched.in_threads else launched.world.hosts

    @property
    def routes(self) -> tuple[Route, ...]:
        """The routes of the last step's microbatches: for each range of each replica's, the worker of every stage.

        Without a slow worker or link each replica has one route, through its own workers. So it has in a step in which a
        replica's batch is not of the shape for which the pipeline was compiled.
        """
        program = self._require().workers[0].program
        if program.is_one_pipeline:
            return Routing.at_home(program.placement, self.replicas, program.microbatches).routes
        return program.routing.routes

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Let this optimizer's state move with the parameters, so that changes of roles and cuts need not be given it.

        Under ``Options(synchrony=adaptra.XOrder(...))`` it is needed before the first step, as late replicas take its state.

        Every rank attaches its own, with the same groups. Another call replaces it. You still call ``optimizer.step()``.

        Args:
            optimizer: A torch optimizer of this process's :meth:`parameters`.

        Raises:
            StateError: The optimizer has parameters that are not this pipeline's. Or it lacks some in x-order, where another
                one's state would not go to late replicas.
            PipelineError: In x-order another one has made updates.
        """
        self.require_own(optimizer)
        for worker in self._require().workers:
            worker.updates.attach(optimizer)
        self._optimizer = optimizer

    def settle_roles(self, optimizer: torch.optim.Optimizer | None = None, *, horizon: int = 1000) -> RoleChange | None:
        """Measure the links between the ranks of a job, and change roles if the simulator predicts a saving.

        A slow link hurts the gradient all-reduce in full; between two stages a schedule hides most of it. A change of roles can
        move a slow link between two stages, or to a pair of ranks that exchanges nothing; see :meth:`take_roles`. All ranks
        call this at the same point between two steps, for example every thousand steps. :attr:`replica` may change then. It
        takes a few round trips per pair of ranks.

        Args:
            optimizer: As for :meth:`take_roles`.
            horizon: The number of steps over which a change must save more than it costs.

        Returns:
            The change that was made, the same on every rank, or None. Its text gives the saving.

        Raises:
            PipelineError: No step has run yet.
            OptionError, StateError, LaunchError, PeerLostError: As :meth:`take_roles`.
        """
        return self._require().changes.settle_roles(given_or_attached("settle_roles", optimizer, self._optimizer), horizon)

    def take_roles(self, roles: Roles, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Change the roles of the ranks of a job with several replicas, so that a slow link carries other messages.

        Parameters, buffers, gradients and the optimizer's state move to the ranks that take the roles. Later steps are bitwise
        the same as without the change. All ranks call this between two steps with the same roles. On ranks that moved,
        :meth:`parameters` returns other tensors, and ``optimizer`` steps these from now on. Each rank then gives :meth:`step`
        the part of the batch for its new :attr:`replica` and stage. Planning starts again from the first plan.

        Args:
            roles: The new roles, such as ``pipe.roles.swapped(1, 2)``.
            optimizer: The torch optimizer of this process's parameters, of the same groups on every rank; by default the one
                given to :meth:`attach`.

        Raises:
            OptionError: There is only one replica, or the roles are of another job. Nothing changes.
            StateError: Some state of a rank can't be moved. No rank has moved, and the pipeline continues as before.
            LaunchError, PeerLostError: A rank did not join or is lost. The pipeline has failed.
        """
        self._require().changes.take_roles(roles, given_or_attached("take_roles", optimizer, self._optimizer))

    @property
    def split(self) -> tuple[str | None, ...]:
        """The modules at which stages 1, 2, … begin, with None for a stage that begins inside a module."""
        return tuple(place.module for place in self._require().compiled.cut_points.chosen)

    def settle_split(self, optimizer: torch.optim.Optimizer | None = None, *, horizon: int = 1000) -> SplitChange | None:
        """Move a cut point if an edge's bandwidth limits the step and the simulator predicts that smaller messages save time.

        No order of ops hides a lack of bandwidth, but a smaller message needs less of it. All ranks call this at the same point
        between two steps, for example every thousand steps. It uses the last measured costs and an estimate of the cost of the
        move.

        Args:
            optimizer: As for :meth:`take_split`.
            horizon: The number of steps over which a change must save more than it costs.

        Returns:
            The change that was made, the same on every rank, or None. Its text gives the saving.

        Raises:
            PipelineError: No step has run yet.
            OptionError, StateError, LaunchError, PeerLostError: As :meth:`take_split`.
        """
        return self._require().changes.settle_split(given_or_attached("settle_split", optimizer, self._optimizer), horizon)

    def take_split(self, split: Sequence[str], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Move the cut points of the running pipeline to other modules.

        Parameters, buffers, gradients and the optimizer's state move to the stages that need them. Later steps are bitwise the
        same as without the change, except for rounding to bfloat16 (``lossy_bf16``), which depends on the cut points. All ranks
        call this between two steps with the same split. On the ranks concerned, :meth:`parameters` returns other tensors, and
        ``optimizer`` steps these from now on. Planning starts again with a first plan for the new stages. The call takes as
        long as cutting and differentiating the captured model took at compilation.

        Args:
            split: Names of the modules that begin stages 1, 2, …, as :func:`compile` takes them.
            optimizer: The torch optimizer of this process's parameters, of the same groups on every rank; by default the one
                given to :meth:`attach`.

        Raises:
            OptionError: The stages were given as modules, or ``split`` is not a list of names. Nothing changes.
            PartitionError, CaptureError, PlanError: The model can't be cut like this. Nothing changes.
            StateError: Some state of a rank can't be moved. No rank has moved, and the pipeline continues as before.
            LaunchError, PeerLostError: A rank did not join, has another split or is lost. The pipeline has failed.
        """
        check_split(split)
        self._require().changes.take_split(split, given_or_attached("take_split", optimizer, self._optimizer))
