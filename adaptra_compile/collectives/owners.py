"""Owners: the replica that keeps the optimizer's state of a parameter, and steps it, where the optimizer is sharded.

A replica owns whole parameters, so that an optimizer which looks at a matrix, or at a norm of it, sees all of it.
"""

from __future__ import annotations

from collections.abc import Mapping


def balanced_owners(sizes: Mapping[str, int], replicas: int, known: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return the owner of each parameter: the largest first, each to the replica that owns the fewest bytes.

    A second owner of each parameter would be chosen here too. It makes the same update, and acts while the first is late.

    Args:
        sizes: The bytes of each parameter by name, in the same order on all replicas.
        replicas: The number of replicas.
        known: Owners that stay.
    """
    owners = {name: owner for name, owner in (known or {}).items() if name in sizes}
    owned = [0] * replicas
    for name, owner in owners.items():
        owned[owner] += sizes[name]
    for name in sorted(sizes.keys() - owners.keys(), key=lambda name: (-sizes[name], name)):
        owner = min(range(replicas), key=owned.__getitem__)
        owners[name] = owner
        owned[owner] += sizes[name]
    return owners
