"""What an update waits for: changes of the mode of synchronisation between two steps."""

from __future__ import annotations

import torch

from adaptra.frontend.pipeline.attached_optimizer import given_or_attached
from adaptra.frontend.pipeline.layout import LayoutMethods
from adaptra.runtime.options.stage_options import Synchrony


class SynchronyMethods(LayoutMethods):
    """What shows and changes the mode of synchronisation of a pipeline between two steps."""

    @property
    def synchrony(self) -> Synchrony:
        """What an update waits for now."""
        return self._require().local.synchrony

    def take_synchrony(self, mode: Synchrony, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Change what an update waits for from the next step on.

        All ranks call this between two steps, with the same mode, after ``optimizer.step()`` and ``optimizer.zero_grad()``.
        Where sites have updated by themselves, they first exchange all that they have learnt. All then go on with the state of
        the first site's optimizer, as each site's was its own. So all replicas are equal to the last bit. Parameters stay the
        same tensors, and the outer optimizer begins anew in each stretch of local steps. Planning starts again from the first
        plan.

        Args:
            mode: ``"exact"`` or ``adaptra.Local(...)``, as for ``Options(synchrony=…)``.
            optimizer: The torch optimizer of all of this process's parameters; by default the one given to :meth:`attach`.

        Raises:
            OptionError: The job can't have this mode, or it does not fit the memory. Nothing changes, on no rank.
            StateError: A rank has a gradient, an optimizer of a part of the parameters, or was given another mode. Nothing
                changes, on no rank. Sites with a quorum have exchanged what they have learnt.
            LaunchError, PeerLostError: A rank did not join or is lost. The pipeline has failed.
        """
        given = given_or_attached("take_synchrony", optimizer, self._optimizer)
        self._require().synchrony.take(mode, given, self._scaler, "take_synchrony")
