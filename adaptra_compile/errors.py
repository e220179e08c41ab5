"""Every error adaptra raises on purpose, in one place, so that a user can catch them by name.

Errors of the user's input also derive from ValueError, errors of the running system from RuntimeError, so code that knows
nothing of adaptra still catches them.
"""


class AdaptraError(Exception):
    """The base of all errors raised by adaptra on purpose."""


class ScheduleError(AdaptraError, ValueError):
    """A schedule that can't be read, or that no set of ranks could execute."""


class CaseError(AdaptraError, ValueError):
    """A cost model or case file with a missing, unknown or impossible value."""


class PassError(AdaptraError, ValueError):
    """A pass pipeline that can't be read, or a pass that refuses the program it is given."""


class PlanError(AdaptraError, ValueError):
    """No plan satisfies the given limits."""


class ReportError(AdaptraError, ValueError):
    """A picture or trace that can't be drawn, read or written as asked."""


class CaptureError(AdaptraError, ValueError):
    """A model that can't become one graph; names the module and the line of the user's model."""


class PartitionError(AdaptraError, ValueError):
    """A graph that can't be cut into the number of stages asked for."""


class BatchError(AdaptraError, ValueError):
    """Inputs of a step that don't fit what the pipeline was compiled for."""


class OptionError(AdaptraError, ValueError):
    """An argument of compile() or an option that is not what it should be."""


class StateError(AdaptraError, ValueError):
    """A checkpoint that does not fit the pipeline it is loaded into."""


class PipelineError(AdaptraError, RuntimeError):
    """A pipeline used before it is compiled, after it failed or after it was closed."""


class LaunchError(AdaptraError, ValueError):
    """Ranks, stages and replicas that don't fit together."""


class TransportError(AdaptraError, RuntimeError):
    """A message that could not be sent or received; names the edge and carries the system's own text."""


class PeerLostError(TransportError):
    """Another rank of the job failed, died or stopped answering.

    Attributes:
        rank: The rank that is lost, or None when it is not a rank: the control store's host.
        edge: The directed edge of stages (source, destination) where it was noticed, if known.
        op: The op of the message that was waited for, such as ``1SEND_F3``, if known.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, edge: tuple[int, int] | None = None, op: str | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.edge = edge
        self.op = op


class ControlError(AdaptraError, RuntimeError):
    """The control plane failed: ranks disagree about a plan, a control message is not what it should be, the store is lost."""


class MissingExtraError(AdaptraError, ImportError):
    """An optional part is not installed; says what to install."""
