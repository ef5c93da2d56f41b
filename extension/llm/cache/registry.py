"""Which layouts exist for which backend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from .config import CacheConfig

# A package announces a module that registers builders when imported: [project.entry-points] of this name, with the
# backend id as the entry's name.
ENTRY_POINT_GROUP = "executorch_mlx.cache_builders"

Builder = Callable[[CacheConfig], Any]

_lock = threading.Lock()
_builders: dict[tuple[str, str], Builder] = {}


def register_builder(backend_id: str, kind: str, builder: Builder) -> None:
    """Make a layout known.

    Args:
        backend_id: the backend whose arrays the layout holds, such as "MLXBackend" or "eager".
        kind: the layout's name, such as "sequence".
        builder: called with a CacheConfig, returns a ``CacheLayout`` that is also a ``CacheControl``.

    Raises:
        ValueError: the pair is taken by another builder.
    """
    with _lock:
        if _builders.setdefault((backend_id, kind), builder) is not builder:
            raise ValueError(f"a builder for cache kind {kind!r} on {backend_id!r} is registered already")


def build(backend_id: str, kind: str, config: CacheConfig) -> Any:
    """Build a cache.

    Args:
        backend_id: as in ``register_builder``.
        kind: as in ``register_builder``.
        config: sizes and dtypes.

    Raises:
        LookupError: an unknown pair; the message names the known ones.
    """
    builder = _builders.get((backend_id, kind))
    if builder is None:
        # Not under the lock: importing takes import locks, and whoever holds one may be waiting to register.
        for entry in entry_points(group=ENTRY_POINT_GROUP):
            if entry.name == backend_id:
                entry.load()
        builder = _builders.get((backend_id, kind))
    if builder is None:
        raise LookupError(f"no cache kind {kind!r} is known on backend {backend_id!r}; known: {_known()}")
    return builder(config)


def _known() -> str:
    with _lock:
        pairs = sorted(_builders)
    unloaded = {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)} - {backend for backend, _ in pairs}
    names = [f"{kind!r} on {backend!r}" for backend, kind in pairs]
    names += [f"those of {backend!r}" for backend in sorted(unloaded)]
    return ", ".join(names) or "none"
