"""Transports by name: adaptra's own, and those that installed packages add.

A package adds a transport by an entry point in the group ``adaptra.transports``. Its object is called with the options given to
:func:`create_transport` and returns a :class:`Transport`. The names ``c10d``, ``delegate``, ``local`` and ``nccl`` are
adaptra's own.
"""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from adaptra.errors import LaunchError
from adaptra.runtime.transports.base import Transport

ENTRY_POINT_GROUP: Final = "adaptra.transports"

_BUILT_IN: Final = {
    "c10d": ("adaptra.runtime.transports.c10d.c10d", "C10dTransport"),
    "delegate": ("adaptra.runtime.transports.delegate.join", "join"),
    "local": ("adaptra.runtime.transports.local", "LocalTransport"),
    "nccl": ("adaptra.runtime.transports.nccl.join", "join"),
}


def is_built_in(name: str) -> bool:
    """Return True if a transport is one of adaptra's own."""
    return name in _BUILT_IN


def transport_names() -> tuple[str, ...]:
    """Return the names of all transports that can be created here, sorted."""
    return tuple(sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))}))


def create_transport(transport: str | Transport, **options: Any) -> Transport:
    """Return the transport of this rank.

    Args:
        transport: A name, or a transport, which is returned as it is.
        options: Passed to the named transport: ``hub`` and ``rank`` for ``local``; ``members`` and ``device`` for ``c10d``. For
            ``delegate`` these, ``addresses`` and ``timing``, and for ``nccl`` ``edges`` too.

    Raises:
        LaunchError: No transport or several have that name, or it can't be loaded or does not return a transport. Or options
            come with a transport that exists already.
    """
    if isinstance(transport, Transport):
        if options:
            raise LaunchError(f"options {', '.join(sorted(options))}: this transport exists already, they change nothing")
        return transport
    if transport in _BUILT_IN:
        module, name = _BUILT_IN[transport]
        return getattr(importlib.import_module(module), name)(**options)
    return _create(_find(transport), options)


def _find(name: str) -> EntryPoint:
    points = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not points:
        raise LaunchError(f"transport {name!r}: expected one of {', '.join(transport_names())}")
    if len(points) > 1:
        raise LaunchError(f"transport {name!r}: added by several packages: {', '.join(sorted(map(_describe, points)))}")
    return points[0]


def _create(point: EntryPoint, options: dict[str, Any]) -> Transport:
    try:
        factory = point.load()
    except Exception as error:
        raise LaunchError(f"transport {point.name!r} of {_describe(point)} can't be loaded: {error}") from error
    transport = factory(**options)
    if not isinstance(transport, Transport):
        raise LaunchError(
            f"transport {point.name!r} of {_describe(point)}: expected a Transport, got {type(transport).__name__}"
        )
    return transport


def _describe(point: EntryPoint) -> str:
    return f"{point.dist.name if point.dist else 'an unknown package'} ({point.value})"
