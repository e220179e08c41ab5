"""Who computes which microbatch of a step, where that is decided as the step runs.

Each replica has one record in the job's store: its step, how many of its microbatches it has begun itself, and who has taken
others. A replica begins its microbatches from the first on, and others take them from the last on. A claim replaces the record
that it has read, and fails if another was quicker. So no microbatch is claimed twice, and none is left out: the replica itself
goes on until nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch.distributed import Store

from adaptra.errors import ControlError
from adaptra.runtime.control_store.stores import Connection

_NO_STEP = -1


@dataclass(frozen=True, slots=True)
class Claimed:
    """What is claimed of one replica's microbatches in a step.

    Attributes:
        step: The step.
        own: How many it has begun itself, or keeps for itself: the first ones.
        thieves: The replicas that have taken the last ones: who has the last, the last but one, and so on.
    """

    step: int
    own: int
    thieves: tuple[int, ...] = ()

    def left(self, microbatches: int) -> int:
        """Return how many microbatches nobody has claimed."""
        return microbatches - self.own - len(self.thieves)

    def takers(self, microbatches: int) -> dict[int, int]:
        """Return by whom each microbatch is computed that another replica has taken, in ascending order."""
        return {microbatches - 1 - place: self.thieves[place] for place in reversed(range(len(self.thieves)))}

    def __str__(self) -> str:
        return f"{self.step} {self.own} {','.join(map(str, self.thieves))}"

    @staticmethod
    def parse(payload: bytes) -> Claimed:
        """Read what ``str`` has written.

        Raises:
            ControlError: It can't be read.
        """
        try:
            step, own, thieves = payload.decode().split(" ")
            return Claimed(int(step), int(own), tuple(map(int, thieves.split(","))) if thieves else ())
        except ValueError:
            raise ControlError(
                f"record of claimed microbatches: {payload[:64]!r}: expected one that adaptra has written"
            ) from None


class Claims:
    """One replica's claims. Used by one thread at a time.

    Args:
        store: The records, shared by all replicas.
        replica: This replica.
        replicas: The number of replicas.
        microbatches: The number of microbatches of each.
    """

    def __init__(self, store: Store, replica: int, replicas: int, microbatches: int) -> None:
        self._store = Connection(store)
        self._replica = replica
        self._replicas = replicas
        self._microbatches = microbatches
        self._now = Claimed(_NO_STEP, microbatches)
        self._store.set(self._key(replica), str(self._now))

    def open(self, step: int, own: int) -> None:
        """Let others take this replica's microbatches of a step, but for the first ``own``."""
        self._now = Claimed(step, own)
        self._store.set(self._key(self._replica), str(self._now))

    def claim(self) -> int | None:
        """Claim this replica's next microbatch and return its number; None if none is left."""
        own = self._now.own
        while self._now.left(self._microbatches):
            self._now = self._replace(self._replica, self._now, replace(self._now, own=own + 1))
            if self._now.own > own:
                return own
        return None

    @property
    def takers(self) -> dict[int, int]:
        """By whom each of this replica's microbatches is computed that another has taken, once none is left to claim."""
        return self._now.takers(self._microbatches)

    def steal(self, may: Callable[[int], bool]) -> tuple[int, int] | None:
        """Claim another replica's last microbatch that nobody has claimed, and return both; None if there is none.

        Args:
            may: Returns whether microbatches of a replica can be computed here now.
        """
        others = [(self._replica + ahead) % self._replicas for ahead in range(1, self._replicas)]
        for other, found in self._most_left_first(others):
            claimed = found
            while claimed.step == self._now.step and claimed.left(self._microbatches) and may(other):
                mine = claimed.thieves.count(self._replica)
                wanted = replace(claimed, thieves=(*claimed.thieves, self._replica))
                claimed = self._replace(other, claimed, wanted)
                # Another may have taken one behind, before the answer to a request that was made twice.
                if claimed.step == self._now.step and claimed.thieves.count(self._replica) > mine:
                    place = max(place for place, thief in enumerate(claimed.thieves) if thief == self._replica)
                    return other, self._microbatches - 1 - place
        return None

    def close(self) -> None:
        """End the connection to the store."""
        self._store.close()

    def _most_left_first(self, others: Sequence[int]) -> list[tuple[int, Claimed]]:
        records = map(Claimed.parse, self._store.multi_get([self._key(other) for other in others]))
        return sorted(zip(others, records, strict=True), key=lambda one: -one[1].left(self._microbatches))

    def _replace(self, replica: int, found: Claimed, wanted: Claimed) -> Claimed:
        return Claimed.parse(self._store.compare_set(self._key(replica), str(found), str(wanted)))

    @staticmethod
    def _key(replica: int) -> str:
        return f"claimed/{replica}"
