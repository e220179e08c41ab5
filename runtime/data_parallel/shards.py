"""Shards of one rank's parameters: each replica owns some, whole, and it alone has their gradients and steps them.

The sum of a gradient is computed at the owner, from the same terms in the same order as without shards. So all bits are the
same. Where a step adds to the gradients of earlier ones, its sums begin from those on every replica, as without shards. They
travel from the owners before such a step.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Final

import torch
from torch import Tensor

from adaptra.errors import OptionError
from adaptra.runtime.data_parallel.checksum import checksums
from adaptra.runtime.data_parallel.gradient_averaging import Replicas
from adaptra.sizes import size_text


class Shards:
    """Who owns which of the trainable parameters of one rank's stages.

    Args:
        replicas: The ranks that have copies of these stages.
        parameters: The trainable parameters by name.
        state: All tensors of the stages by name.
        owners: The replica that owns each parameter that a sharded optimizer has. One may not be trained any more.

    Attributes:
        replicas: As given.
        owners: As given.
    """

    def __init__(
        self, replicas: Replicas, parameters: Mapping[str, Tensor], state: Mapping[str, Tensor], owners: Mapping[str, int]
    ) -> None:
        self.replicas: Final = replicas
        self.owners: Final = owners
        self._parameters = parameters
        self._state = state

    def __str__(self) -> str:
        """How sums are made, and what a late owner costs beside one that owned nothing: it sends what it has stepped last."""
        owned = Counter[int]()
        for name, owner in self.owners.items():
            owned[owner] += self._state[name].nbytes
        most = max(owned.values(), default=0)
        told = f"to the owners of parameters, as the optimizer is sharded; {size_text(most)} at most have one owner"
        if (link := self.replicas.link) is None:
            return told
        seconds = link.latency + (self.replicas.count - 1) * most * link.per_byte
        return f"{told}, which takes {1e3 * seconds:.1f} ms to send to the other replicas; if it is late, they wait for that"

    @property
    def elsewhere(self) -> list[str]:
        """The parameters that other replicas own."""
        return [name for name, owner in self.owners.items() if owner != self.replicas.index]

    def require_all(self) -> None:
        """Refuse a step in which some parameter would be stepped by nobody, or by the optimizer of one replica only.

        Raises:
            OptionError: A trainable parameter is in no sharded optimizer; names it.
        """
        for name in self._parameters:
            if name not in self.owners:
                raise OptionError(
                    f"{name}: in no optimizer of pipe.shard, where others are: expected all trainable parameters in sharded "
                    "optimizers, or none"
                )

    def begin_step(self, aside: Collection[str]) -> dict[str, Tensor]:
        """Make parameters equal on all replicas, and return the gradients of earlier steps, as their owners have them.

        All replicas call it at the begin of a step. Parameters differ where their owner alone has changed them since they were
        brought: a loop over an optimizer's groups sees no others. Its values are those of all then.

        Args:
            aside: The names of parameters of which no gradients are needed.

        Raises:
            PeerLostError: Another replica has failed.
        """
        names = [name for name in self._parameters if name not in aside]
        mine = [self.owners[name] == self.replicas.index for name in names]
        own = {name: self._parameters[name].grad if is_own else None for name, is_own in zip(names, mine, strict=True)}
        sums = checksums([self._state[name] for name in self.owners])
        count = len(names)
        # The largest of a number and of its complement: they fit together only where the number is the same on all replicas.
        maxima = self.replicas.largest([*(int(one is not None) for one in own.values()), *sums, *(~one for one in sums)])
        largest, complements = maxima[count : count + len(sums)], maxima[count + len(sums) :]
        pairs = zip(self.owners, largest, complements, strict=True)
        if changed := [name for name, one, complement in pairs if one != ~complement]:
            self.bring_parameters(changed)
        earlier: dict[str, Tensor] = {}
        for (name, gradient), is_there in zip(own.items(), maxima[:count], strict=True):
            if is_there:
                earlier[name] = torch.empty_like(self._parameters[name]) if gradient is None else gradient
        if earlier:
            self.replicas.bring_from_owners([*earlier.values()], [self.owners[name] for name in earlier])
        return earlier

    def bring_parameters(self, names: Sequence[str]) -> None:
        """Replace parameters by those of their owners, which have stepped them. All replicas call it, with the same names.

        Raises:
            PeerLostError: Another replica has failed.
        """
        self.replicas.bring_from_owners([self._state[name] for name in names], [self.owners[name] for name in names])

    def whole_norms(self, names: Sequence[str], norms: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norms of parameters' gradients, each from its owner. All replicas call it between two steps.

        Args:
            names: The names of the parameters.
            norms: The norms of their gradients here, (parameters,), in float64.
            codes: A number beside each, (parameters,), on the host.

        Raises:
            PeerLostError: Another replica has failed.
        """
        rows = self.replicas.gather([*norms.view(torch.int64).tolist(), *codes.tolist()])
        owners = [self.owners.get(name, self.replicas.index) for name in names]
        bits = [rows[owner][number] for number, owner in enumerate(owners)]
        whole = torch.tensor(bits, dtype=torch.int64).view(torch.float64).to(norms.device)
        return whole, torch.tensor([rows[owner][len(names) + number] for number, owner in enumerate(owners)], dtype=codes.dtype)


def require_same_settings(replicas: Replicas, settings: Sequence[str]) -> None:
    """Refuse settings of an optimizer that differ. All replicas call it between two steps.

    Args:
        replicas: The replicas, each with its own settings.
        settings: A text for each setting.

    Raises:
        OptionError: Another replica has other ones; names the first that differs, there and here.
        PeerLostError: Another replica has failed.
    """
    text = "\n".join(settings).encode()
    told = replicas.gather([zlib.crc32(text), len(text)])
    if all(one == told[0] for one in told):
        return
    longest = max(length for _, length in told)
    texts = replicas.gather([*text.ljust(longest)])
    there = [bytes(one).decode().rstrip().split("\n") for one in texts]
    other = next(number for number, one in enumerate(there) if one != there[replicas.index])
    pairs = zip_longest(there[other], there[replicas.index], fillvalue="no other setting")
    different, own = next((one, mine) for one, mine in pairs if one != mine)
    raise OptionError(
        f"shard: replica {other} was given {different:.80}, and replica {replicas.index} {own:.80}: expected the same settings "
        "on every rank"
    )
