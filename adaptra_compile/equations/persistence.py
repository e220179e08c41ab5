"""The equations of lasting slowness: the hazard that it ends, the chance that it goes on, and what waiting costs.

Sources: Kaplan and Meier (1958) for spells whose end is not seen. Karlin et al. (1988) for renting or buying. The rest is own.
The import of this module doesn't import sympy.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

from adaptra.equations.equation import Equation

PERSISTENCE_SYMBOLS: Final = {
    "d": "spells of slowness that ended at some age",
    "n": "spells that could have ended at it: those seen to be that old, and whether they went on",
    "c": "ended spells that the prior is worth",
    "h": "hazard: the chance that a spell of some age ends with this step; h_0 by the prior",
    "S": "chance that slowness goes on for the steps that are waited",
    "M": "expected steps of slowness until the end of the wait, or of the spell if that is sooner",
    "R": "expected steps of slowness from now on",
    "w": "seconds that a step of slowness costs as long as nothing is changed",
    "p": "price of the change, there and back, in seconds",
}
"""The meaning of each symbol, without its index."""


@dataclass(frozen=True, slots=True)
class PersistenceEquations:
    """All equations of the model; :func:`persistence_equations` makes the one instance.

    Attributes:
        kaplan_meier: The factor by which the chance to go on falls at an age. It is right with any number of unseen ends.
        hazard: The same as a hazard, with a prior: a Gamma distribution of shape c and mean h_0.
        waiting: What it costs to wait for some steps, and to change then if slowness goes on.
        pays: Whether a change pays if it is made now or never.
        latest: Waiting ends after this many steps at the latest. A wait of just that many costs at most twice what foresight
            would, and a shorter one at most one price more.
    """

    kaplan_meier: Equation
    hazard: Equation
    waiting: Equation
    pays: Equation
    latest: Equation


@functools.cache
def persistence_equations() -> PersistenceEquations:
    """Return the equations, which are built on the first call."""
    import sympy

    ended, seen, worth, before = sympy.symbols("d n c h_0", positive=True)
    lasts, until, rest, slow, price = sympy.symbols("S M R w p", nonnegative=True)
    return PersistenceEquations(
        kaplan_meier=Equation("chance to go on past an age", "Kaplan and Meier", 1 - ended / seen, (ended, seen)),
        hazard=Equation(
            "hazard at an age", "Gamma prior", (ended + worth) / (seen + worth / before), (ended, seen, worth, before)
        ),
        waiting=Equation("cost of a wait", "definition", slow * until + price * lasts, (slow, until, price, lasts)),
        pays=Equation("a change pays", "definition", slow * rest > price, (slow, rest, price)),
        latest=Equation("steps that are waited at most", "Karlin et al.", price / slow, (price, slow)),
    )
