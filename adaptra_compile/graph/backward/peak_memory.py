"""Peak memory of the graphs of a stage while they run, in bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree


def peak_bytes(graph: fx.Graph, *, foreign: Collection[int], staying: Collection[int] = ()) -> int:
    """Return the peak bytes of a graph of ``split.build``, its inputs included.

    A tensor lives until the last use of it or of a view of it. Temporary memory inside an op is not known and not counted.

    Args:
        graph: A graph whose nodes have fake tensors.
        foreign: Positions of the inputs that belong to the caller and are not counted.
        staying: Positions of the inputs that stay alive after their last use.
    """
    nodes = list(graph.nodes)
    taken = [node for node in nodes if node.op == "placeholder"]
    excluded = set(_storages(taken[index] for index in foreign))
    sizes: dict[StorageWeakRef, int] = {}
    allocated: list[list[StorageWeakRef]] = []
    last_use: dict[StorageWeakRef, int] = {}
    for index, node in enumerate(nodes):
        allocated.append([])
        for storage, size in _storages([node]).items():
            if storage not in excluded and storage not in sizes:
                sizes[storage] = size
                allocated[index].append(storage)
        for storage in _storages([node, *node.all_input_nodes]):
            last_use[storage] = index
    last_use |= dict.fromkeys(_storages(taken[index] for index in staying), len(nodes))
    ends: dict[int, int] = {}
    for storage, size in sizes.items():
        ends[last_use[storage]] = ends.get(last_use[storage], 0) + size
    held = peak = 0
    for index in range(len(nodes)):
        held += sum(sizes[storage] for storage in allocated[index])
        peak = max(peak, held)
        held -= ends.get(index, 0)
    return peak


def storage_bytes(nodes: Iterable[fx.Node], *, apart_from: Iterable[fx.Node]) -> int:
    """Return the bytes of the storages of the nodes' values, each once, without those that ``apart_from`` has too."""
    excluded = set(_storages(apart_from))
    return sum(size for storage, size in _storages(nodes).items() if storage not in excluded)


def sharing_storage(nodes: Iterable[fx.Node], others: Iterable[fx.Node]) -> list[int]:
    """Return the positions of the nodes whose values have a storage in common with one of the others."""
    storages = _storages(others).keys()
    return [at for at, node in enumerate(nodes) if not storages.isdisjoint(_storages([node]))]


def _storages(nodes: Iterable[fx.Node]) -> dict[StorageWeakRef, int]:
    """Return the storages of the nodes' values and their sizes in bytes."""
    leaves = [leaf for node in nodes for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    return {StorageWeakRef(leaf.untyped_storage()): leaf.untyped_storage().nbytes() for leaf in leaves}
