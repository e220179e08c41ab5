"""The arguments of ``compile``, checked before anything else happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from adaptra.errors import LaunchError, OptionError
from adaptra.frontend.arguments.fingerprints import describe_function, describe_model
from adaptra.frontend.arguments.mesh import roles_of
from adaptra.frontend.arguments.wrapped_models import refuse_wrapped
from adaptra.graph.inner_compiler import EAGER, check_inner
from adaptra.program.placement import in_turn, v_shaped
from adaptra.program.roles import Roles
from adaptra.runtime.injection.faults import Fault
from adaptra.runtime.options import Options, is_whole
from adaptra.runtime.transports.registry import is_built_in, transport_names
from adaptra.runtime.worker.loss_reduction import Reduction
from adaptra.sizes import MemoryLimit

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


STRAIGHT: Final = "straight"
V: Final = "v"


@dataclass(frozen=True, slots=True)
class CompileArguments:
    """The arguments of :func:`adaptra.frontend.api.compile`, which describes them.

    Two more are internal. ``with_loss`` is for :mod:`adaptra.frontend.two_pass`. ``keeps_whole`` is for
    :mod:`adaptra.frontend.dynamo`: whether the caller keeps every rank's model complete and up to date.

    Raises:
        OptionError: An argument is invalid. The text names it, its value and what is expected.
        LaunchError: The transport does not exist.
        CaseError: A fault can't be parsed, or names a stage that does not exist.
    """

    model: nn.Module | Sequence[nn.Module]
    stages: int
    microbatches: int
    loss: Callable[..., Any] | None
    memory: int | str | None
    split: Sequence[str] | None
    mesh: DeviceMesh | None
    transport: str | None
    options: Options
    placement: str = STRAIGHT
    with_loss: bool = True
    reduction: str = Reduction.MEAN
    keeps_whole: bool = False

    def __post_init__(self) -> None:
        self._check_model()
        self._check_numbers()
        given: Any = self.loss
        if given is not None and not callable(given):
            raise OptionError(
                f"loss={given!r}: expected a function of (outputs, targets), or None if the model returns the loss"
            )
        if self.split is not None:
            check_split(self.split)
        self._check_placement()
        given = self.reduction
        if given not in tuple(Reduction):
            raise OptionError(f"reduction={given!r}: expected 'mean', 'sum' or 'weighted'")
        given = self.transport
        if given is not None and given not in transport_names():
            raise LaunchError(f"transport {given!r}: expected one of {', '.join(transport_names())}")
        if self.roles is not None and given == "local":
            raise OptionError("mesh= with transport 'local': expected another transport, as 'local' runs all in one process")
        given = self.options
        if not isinstance(given, Options):
            raise OptionError(f"options={given!r}: expected adaptra.Options(...)")
        if not self.with_loss and given.schedule is not None:
            raise OptionError(
                f"schedule={given.schedule!r}: the function returns no loss, so all forwards come before all backwards: "
                "expected None"
            )
        if given.lossy_bf16 and self.transport is not None and not is_built_in(self.transport):
            raise OptionError(
                f"lossy_bf16={given.lossy_bf16!r} with transport {self.transport!r}: expected a transport of adaptra's own, "
                "which all can round"
            )
        for edge in self.options.delegated:
            if max(edge) >= self.stages:
                raise OptionError(f"delegate={self.options.delegate!r}: expected edges of stages 0..{self.stages - 1}")
            self._check_edge(f"delegate={self.options.delegate!r}", edge)
        for fault in self.faults:
            fault.check_stages(self.stages)
            if fault.peer is not None:
                self._check_edge(f"fault '{fault}'", (fault.stage, fault.peer))
        check_inner(given.inner)

    def _check_model(self) -> None:
        given: Any = self.model
        if not isinstance(given, nn.Module) and not (_is_list(given) and all(isinstance(one, nn.Module) for one in given)):
            raise OptionError(
                f"model: a {type(given).__name__}: expected a torch.nn.Module, or a list of them, one for every stage"
            )
        modules = self.stage_modules
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

    def _check_placement(self) -> None:
        given: Any = self.placement
        if given not in (STRAIGHT, V):
            raise OptionError(f"placement={given!r}: expected {STRAIGHT!r} or {V!r}")
        if given == V and self.stages % 2:
            raise OptionError(
                f"placement={given!r} with stages={self.stages}: expected an even number, two stages for each rank"
            )

    def _check_edge(self, what: str, edge: tuple[int, int]) -> None:
        """Refuse an edge between two stages of one rank, since no message crosses it."""
        source, destination = (self.placed[stage] for stage in edge)
        if source == destination:
            raise OptionError(
                f"{what}: stages {edge[0]} and {edge[1]} are both on rank {source}: expected an edge between ranks"
            )

    def _check_numbers(self) -> None:
        numbers: dict[str, Any] = {"stages": self.stages, "microbatches": self.microbatches}
        if isinstance(self.memory, str):
            MemoryLimit.parse(self.memory)
        elif self.memory is not None:
            numbers["memory"] = self.memory
        for name, given in numbers.items():
            if not is_whole(given) or given < 1:
                raise OptionError(f"{name}={given!r}: expected a whole number of at least 1")

    @property
    def memory_limit(self) -> MemoryLimit | None:
        """The limit of a rank's activations; None if the user gave none."""
        return None if self.memory is None else MemoryLimit.parse(self.memory)

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
        return in_turn(self.stages) if self.placement == STRAIGHT else v_shaped(self.stages // 2)

    @property
    def ranks(self) -> int:
        """The number of ranks of the pipeline."""
        return len(set(self.placed))

    @property
    def roles(self) -> Roles | None:
        """Return the stage and replica of each rank of the job, if a mesh gives them, else None."""
        return None if self.mesh is None else roles_of(self.mesh, self.ranks)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Return the faults to inject."""
        return tuple(map(Fault.parse, self.options.faults))

    def facts(self) -> dict[str, str]:
        """Return the values that must be equal on all ranks, as text by argument name. The stages are compared later."""
        options = self.options
        return {
            "stages": str(self.stages),
            "placement": str(self.placement),
            "microbatches": str(self.microbatches),
            "memory": str(self.memory),
            "split": str(None if self.split is None else list(self.split)),
            "mesh": str(self.roles and list(self.roles.ranks)),
            "transport": str(self.transport),
            "model": describe_model(self.model),
            "loss": "None" if self.loss is None else describe_function(self.loss),
            "with_loss": str(self.with_loss),
            "reduction": str(self.reduction),
            "keeps_whole": str(self.keeps_whole),
            "options.adapt": str(options.adapt),
            "options.schedule": str(options.schedule),
            "options.expected_delays": str({edge: dict(delays) for edge, delays in options.expected_delays.items()}),
            "options.seed": str(options.seed),
            "options.faults": str(list(options.faults)),
            "options.emulate": str(options.emulate),
            "options.delegate": str(options.delegate),
            "options.lossy_bf16": str(options.lossy_bf16),
            "options.inner": str(options.inner),
            "options.broadcast_buffers": str(options.broadcast_buffers),
        }


def check_split(given: Any) -> None:
    """Refuse a value that is not a list of module names.

    Raises:
        OptionError: The value is refused. The text shows it.
    """
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given):  # pyright: ignore[reportUnknownVariableType]
        raise OptionError(f"split={given!r}: expected a list of module names, one for every stage but the first")


def _is_list(model: object) -> bool:
    """Return whether a model is a list of stages. A ModuleList is; a class derived from it may have its own forward."""
    return isinstance(model, list | tuple) or type(model) is nn.ModuleList
