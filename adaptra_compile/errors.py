"""All errors that adaptra raises on purpose, so that users can catch them by name.

Errors of the user's input also derive from ValueError, errors of the running system from RuntimeError. So code that does not
import adaptra can catch them too.
"""


class AdaptraError(Exception):
    """The base of all errors raised by adaptra on purpose."""


class ScheduleError(AdaptraError, ValueError):
    """A schedule that can't be parsed, or that no set of ranks can execute."""


class ProgramTextError(ScheduleError):
    """A text that is no program.

    Attributes:
        reason: What stands there and what was expected.
        line: The line of the text, counted from one.
        column: The column of the word that does not fit, counted from one.
    """

    def __init__(self, reason: str, *, line: int = 1, column: int = 1) -> None:
        super().__init__(reason)
        self.reason = reason
        self.line = line
        self.column = column

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}: {self.reason}"


class InvalidProgramError(ScheduleError):
    """A program that no set of ranks can execute.

    Attributes:
        rank: The rank or worker where the first broken rule was found.
        number: The number of the op in that one's order, counted from zero. None if an op is missing there.
    """

    def __init__(self, message: str, *, rank: int = 0, number: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.number = number


class CaseError(AdaptraError, ValueError):
    """A cost model or case file with a missing, unknown or impossible value."""


class PassError(AdaptraError, ValueError):
    """A pass pipeline that can't be parsed, or a pass that refuses its program."""


class PlanError(AdaptraError, ValueError):
    """No plan satisfies the given limits."""


class ReportError(AdaptraError, ValueError):
    """A picture or trace that can't be drawn, read or written."""


class CaptureError(AdaptraError, ValueError):
    """A model that can't become one graph. The text names the module and the line of the user's model."""


class PartitionError(AdaptraError, ValueError):
    """A graph that can't be cut into the requested stages."""


class BatchError(AdaptraError, ValueError):
    """Inputs of a step that differ from those for which the pipeline was compiled."""


class OptionError(AdaptraError, ValueError):
    """An invalid argument of compile(), or an invalid option."""


class StateError(AdaptraError, ValueError):
    """A checkpoint that does not fit the pipeline that loads it."""


class PipelineError(AdaptraError, RuntimeError):
    """A pipeline used before it is compiled, after it failed or after it was closed."""


class LaunchError(AdaptraError, ValueError):
    """Ranks, stages and replicas that don't fit together."""


class TransportError(AdaptraError, RuntimeError):
    """A message that could not be sent or received. The text names the edge and includes the system's own text."""


class PeerLostError(TransportError):
    """Another rank of the job failed, died or stopped answering.

    Attributes:
        rank: The lost rank, or None if the control store's host is lost.
        edge: The directed edge (source stage, destination stage) on which the loss was noticed, if known.
        op: The op of the awaited message, such as ``1SEND_F3``, if known.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, edge: tuple[int, int] | None = None, op: str | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.edge = edge
        self.op = op


class StageLostError(PeerLostError):
    """All processes that have the parameters of a stage are lost. Only a checkpoint has them."""


class DataLostError(PeerLostError):
    """All processes that are given the batch of a replica are lost."""


class FencedError(PeerLostError):
    """The others went on without this process, which they took for lost."""


class ControlError(AdaptraError, RuntimeError):
    """The control plane failed: ranks disagree about a plan, a control message is invalid, or the store is lost."""


class MissingExtraError(AdaptraError, ImportError):
    """An optional part is not installed. The text says what to install."""
