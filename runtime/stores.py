"""The key-value stores of torch.distributed that carry the control plane."""

from __future__ import annotations

from torch.distributed import Store


def clone(store: Store) -> Store:
    """Another client of the same store: who blocks on one client holds up every other user of that client."""
    return store.clone()  # pyright: ignore[reportAttributeAccessIssue] - torch's annotations lack the method
