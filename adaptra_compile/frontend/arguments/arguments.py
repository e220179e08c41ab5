"""The arguments of ``compile``, checked before anything else happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import is_lazy

from adaptra.checks import is_list_of, require_count, require_word
from adaptra.errors import LaunchError, OptionError
from adaptra.frontend.arguments.fingerprints import describe_function, describe_model
from adaptra.frontend.arguments.mesh import describe_mesh, roles_of
from adaptra.frontend.arguments.placing import STRAIGHT, Placement, placed_on
from adaptra.frontend.arguments.wrapped_models import refuse_wrapped
from adaptra.graph.inner_compiler import EAGER, check_inner
from adaptra.planning.synchrony.modes import Deadline, Stealing, XOrder
from adaptra.program import Program
from adaptra.program.roles import Roles
from adaptra.runtime.injection.faults import Fault
from adaptra.runtime.options import Options
from adaptra.runtime.options.rank_agreement import agreed, agreed_values, each_field
from adaptra.runtime.options.stage_options import EXACT, Synchrony
from adaptra.runtime.transports.registry import is_built_in, transport_names
from adaptra.runtime.worker.stages.loss_reduction import Reduction
from adaptra.runtime.world.world import Survival
from adaptra.sizes import MemoryLimit

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


def _given(value: object) -> str:
    """Describe only whether a value is given: files may lie in different places, and functions be of different processes."""
    return "None" if value is None else "given"


@dataclass(frozen=True, slots=True)
class CompileArguments:
    """The arguments of :func:`adaptra.frontend.api.compile`, which describes them.

    Two more are internal. ``with_loss`` is for :mod:`adaptra.frontend.two_pass`. ``keeps_whole`` is for
    :mod:`adaptra.frontend.dynamo`: whether the caller keeps every rank's model complete and up to date.

    Raises:
        OptionError: An argument is invalid. The text names it, its value and what is expected.
        LaunchError: The transport does not exist.
        CaseError: A fault can't be parsed, names a stage that does not exist, or divides a rate that no other fault gives.
    """

    model: nn.Module | Sequence[nn.Module] = field(metadata=agreed(describe_model))
    stages: int = field(metadata=agreed())
    microbatches: int = field(metadata=agreed())
    loss: Callable[..., Any] | None = field(metadata=agreed(describe_function))
    memory: int | str | None = field(metadata=agreed())
    split: Sequence[str] | None = field(metadata=agreed())
    mesh: DeviceMesh | None = field(metadata=agreed(describe_mesh))
    transport: str | None = field(metadata=agreed())
    options: Options = field(metadata=each_field())
    placement: Placement = field(default=STRAIGHT, metadata=agreed())
    with_loss: bool = field(default=True, metadata=agreed())
    reduction: str = field(default=Reduction.MEAN, metadata=agreed())
    keeps_whole: bool = field(default=False, metadata=agreed())
    weights: str | Path | None = field(default=None, metadata=agreed(_given))
    replicas: int | None = field(default=None, metadata=agreed())
    batches: Callable[[int, int], Any] | None = field(default=None, metadata=agreed(_given))

    def __post_init__(self) -> None:
        self._check_model()
        self._check_numbers()
        loss: Any = self.loss
        if loss is not None and not callable(loss):
            raise OptionError(
                f"loss={loss!r}: expected a function of (outputs, targets), or None if the model returns the loss"
            )
        batches: Any = self.batches
        if batches is not None and not callable(batches):
            raise OptionError(f"batches={batches!r}: expected a function of (step, replica) that returns the batch, or None")
        if self.split is not None:
            check_split(self.split)
        require_word("reduction", self.reduction, [str(one) for one in Reduction])
        transport: Any = self.transport
        if transport is not None and transport not in transport_names():
            raise LaunchError(f"transport {transport!r}: expected one of {', '.join(transport_names())}")
        if self.roles is not None and transport == "local":
            raise OptionError("mesh= with transport 'local': expected another transport, as 'local' runs all in one process")
        options: Any = self.options
        if not isinstance(options, Options):
            raise OptionError(f"options={options!r}: expected adaptra.Options(...)")
        if not self.with_loss and options.schedule is not None:
            raise OptionError(
                f"schedule={options.schedule!r}: the function returns no loss, so all forwards come before all backwards: "
                "expected None"
            )
        if options.lossy_bf16 and self.transport is not None and not is_built_in(self.transport):
            raise OptionError(
                f"lossy_bf16={options.lossy_bf16!r} with transport {self.transport!r}: expected a transport of adaptra's own, "
                "which all can round"
            )
        if options.survive and not self.with_loss:
            raise OptionError(
                "survive=True: the function returns no loss, so forwards live on between two calls: expected a model whose "
                "loss adaptra.compile knows, as a step is done again as a whole"
            )
        if options.survive and options.lossy_bf16 == "slow":
            raise OptionError(
                "survive=True with lossy_bf16='slow', where each replica plans which messages round: expected True or False"
            )
        for mode in options.possible_synchrony:
            check_synchronised(mode, options, with_loss=self.with_loss)
        self._check_edges()
        check_inner(options.inner)
        weights: Any = self.weights
        if weights is not None and not isinstance(weights, str | Path):
            raise OptionError(f"weights={weights!r}: expected the path of a file or folder, or None")

    def _check_model(self) -> None:
        model: Any = self.model
        if not isinstance(model, nn.Module) and not (_is_list(model) and all(isinstance(one, nn.Module) for one in model)):
            raise OptionError(
                f"model: a {type(model).__name__}: expected a torch.nn.Module, or a list of them, one for every stage"
            )
        modules = self.stage_modules
        lazy = [name for name, one in self.whole_model.named_parameters() if is_lazy(one)]
        if lazy:
            raise OptionError(
                f"model: {lazy[0]} is lazy, and has no shape yet: expected one with values; call the model with a batch before "
                "adaptra.compile"
            )
        inferred = [name for name, one in self.whole_model.named_parameters() if one.is_inference()]
        if inferred:
            raise OptionError(
                f"model: {inferred[0]} was made within torch.inference_mode(), and can't be trained: expected a model that is "
                "made outside of it"
            )
        refuse_wrapped(self.whole_model, stages_as_given=modules is not None)
        if modules is None:
            return
        if len(modules) != self.stages:
            raise OptionError(
                f"model: a list of {len(modules)} modules with stages={self.stages!r}: expected one for every stage; "
                "torch.nn.Sequential joins several to one"
            )
        if self.split is not None:
            raise OptionError(f"split={self.split!r}: expected None, as the model is a list of stages already")
        if self.options.inner != EAGER:
            raise OptionError(
                f"inner={self.options.inner!r}: expected 'eager', as the model is a list of stages, which run as they are: "
                "compile one by its module.compile() before"
            )

    def _check_edges(self) -> None:
        options = self.options
        for edge in options.delegated:
            if max(edge) >= self.stages:
                raise OptionError(f"delegate={options.delegate!r}: expected edges of stages 0..{self.stages - 1}")
            self._check_edge(f"delegate={options.delegate!r}", edge)
        for edge in options.expected_delays:
            if max(edge) < self.stages:  # planning names an edge that does not exist
                self._check_edge(f"expected_delays={options.expected_delays!r}", edge)
        for fault in self.faults:
            fault.check_stages(self.stages)
            fault.check_point(self.placed, self.microbatches, with_loss=self.with_loss)
            fault.check_base(self.faults)
            if fault.peer is not None:
                self._check_edge(f"fault '{fault}'", (fault.stage, fault.peer))

    def _check_edge(self, what: str, edge: tuple[int, int]) -> None:
        """Refuse an edge between two stages of one rank, since no message crosses it."""
        source, destination = (self.placed[stage] for stage in edge)
        if source == destination:
            raise OptionError(
                f"{what}: stages {edge[0]} and {edge[1]} are both on rank {source}: expected an edge between ranks"
            )

    def _check_numbers(self) -> None:
        require_count("stages", self.stages)
        require_count("microbatches", self.microbatches)
        if self.replicas is not None:
            require_count("replicas", self.replicas)
        _ = self.limit

    @property
    def limit(self) -> MemoryLimit | None:
        """``memory`` in the form that planning takes."""
        return None if self.memory is None else MemoryLimit.given(self.memory, self.ranks)

    @property
    def stage_modules(self) -> nn.ModuleList | None:
        """Return the stages, if the model is given as a list of them, else None."""
        return nn.ModuleList(self.model) if _is_list(self.model) else None  # pyright: ignore[reportArgumentType]

    @property
    def whole_model(self) -> nn.Module:
        """Return the model as one module. The pipeline uses its parameters' names."""
        return self.model if isinstance(self.model, nn.Module) else nn.ModuleList(self.model)

    @property
    def placed(self) -> tuple[int, ...]:
        """The rank of the pipeline for each stage."""
        return placed_on(self.placement, self.stages)

    @property
    def ranks(self) -> int:
        """The number of ranks of the pipeline."""
        return len(set(self.placed))

    @property
    def roles(self) -> Roles | None:
        """Return the stage and replica of each rank of the job, if a mesh gives them, else None."""
        return None if self.mesh is None else roles_of(self.mesh, self.ranks, self.replicas)

    @property
    def survival(self) -> Survival:
        """How far the job goes on after the loss of processes."""
        if not self.options.survive:
            return Survival.NOT
        return Survival.WITH_HOMES if self.batches is None else Survival.WITHOUT_HOMES

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Return the faults to inject."""
        return tuple(map(Fault.parse, self.options.faults))

    def facts(self) -> dict[str, str]:
        """Return the values that must be equal on all ranks, as text by argument name. The stages are compared later."""
        return agreed_values(self)


def check_split(split: Any) -> None:
    """Refuse a value that is not a list of module names.

    Raises:
        OptionError: The value is refused. The text shows it.
    """
    if not is_list_of(str, split):
        raise OptionError(f"split={split!r}: expected a list of module names, one for every stage but the first")


def check_synchronised(mode: Synchrony, options: Options, *, with_loss: bool) -> None:
    """Refuse a mode of synchronisation beside options that it can't be had with.

    Args:
        mode: The mode.
        options: The options.
        with_loss: Whether the function that is compiled returns its loss.

    Raises:
        OptionError: The text names what it can't be had with.
    """
    schedule: Any = options.schedule
    is_routed = isinstance(schedule, Program) and not schedule.is_one_pipeline
    no_loss = not with_loss, "a model whose loss adaptra.compile knows"
    of_sites = {
        "survive=True": (options.survive, "a job without it, as a lost site takes along what it has learnt"),
        "a function that returns no loss": no_loss,
        "a schedule of several replicas": (is_routed, "one of a single pipeline, as sites compute nothing for each other"),
    }
    of_thieves = {
        "survive=True": (options.survive, "a job without it, as a step that is done again may have other microbatches"),
        "a function that returns no loss": no_loss,
        "lossy_bf16='slow'": (
            options.lossy_bf16 == "slow",
            "True or False, as each replica plans which messages round, and others' microbatches would round otherwise",
        ),
        "a schedule of several replicas": (
            is_routed,
            "one of a single pipeline, as it is decided in each step who computes what",
        ),
    }
    of_deadline = {
        "survive=True": of_thieves["survive=True"],
        "a function that returns no loss": no_loss,
        "noise_scale=True": (options.noise_scale, "False, as replicas have other numbers of microbatches in each step"),
        "a schedule of several replicas": of_thieves["a schedule of several replicas"],
    }
    of_mode: Mapping[type, Mapping[str, tuple[bool, str]]] = {Stealing: of_thieves, Deadline: of_deadline}
    reasons = {} if mode == EXACT else of_mode.get(type(mode), of_sites)
    for what, (holds, expected) in reasons.items():
        if holds:
            raise OptionError(f"synchrony={mode} with {what}: expected {expected}")


def refuse_scaler(call: str, mode: Synchrony, sites: int) -> None:
    """Refuse an enabled gradient scaler where replicas update by themselves in x-order.

    Each replica's scaler would grow and leave out steps by the number of its own steps. Sums would have terms of different
    scales, and a step that is left out would be missing in an update of others.

    Raises:
        OptionError: The mode is one of these.
    """
    if isinstance(mode, XOrder) and sites > 1:
        raise OptionError(
            f"{call}: a gradient scaler under Options(synchrony={mode!r}): expected none, or one with enabled=False, as each "
            "replica's would scale by the number of its own steps; bfloat16 needs none"
        )


def _is_list(model: object) -> bool:
    """Return whether a model is a list of stages. A ModuleList is; a class derived from it may have its own forward."""
    return isinstance(model, list | tuple) or type(model) is nn.ModuleList
