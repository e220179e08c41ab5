"""The memory of hosts that sites need to update by themselves."""

from __future__ import annotations

from adaptra.frontend.planned.stage_planning import PlannedPipeline
from adaptra.planning.synchrony.modes import Apart, Local
from adaptra.program.placement import stages_of
from adaptra.runtime.launch.free_memory import require_host_memory
from adaptra.runtime.launch.job import Launch
from adaptra.runtime.world.world import World


def require_site_memory(
    apart: Apart, planned: PlannedPipeline, launched: Launch, world: World, smallest: int, timeout: float
) -> None:
    """Refuse a mode whose copies of the model are too large. All ranks refuse it alike.

    Args:
        apart: The mode.
        planned: The stages.
        launched: The ranks of this process.
        world: The world of these sites.
        smallest: The bytes of an element of the parameters; the fewest, if they differ.
        timeout: Seconds to wait for the other ranks.

    Raises:
        OptionError: It does not fit the memory of a host.
    """
    compiled, placement = planned.compiled, planned.initial.case.placement
    # The outer optimizer keeps two copies of what is trained, in float32 or better. An exchange needs a third one. The
    # replicas of a site share them. In x-order parameters and an optimizer's two copies are received, and then unpacked.
    copies = 3 if isinstance(apart, Local) else 6
    widened = max(4 // smallest, 1)
    here = sum(compiled.train[stage].parameter_bytes for rank in launched.ranks for stage in stages_of(rank, placement))
    require_host_memory(launched, copies * widened * here * world.sites // world.replicas, f"synchrony={apart}", timeout)
