"""Which cache a forward uses: sessions install caches, a context says which one is active."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_lock = threading.Lock()
_keys = itertools.count()
_installed: dict[str, Any] = {}
# Innermost last. A new thread starts with none; an asyncio task starts with its creator's.
_active: ContextVar[tuple[str, ...]] = ContextVar("executorch_mlx_active_caches", default=())


class CacheSession:
    """Installs a cache while the ``with`` block runs and makes it the active one inside.

    The cache outlives its session: it may be used in another session later, with what it holds.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._key: str | None = None

    @property
    def key(self) -> str:
        """The process-unique key of the installed cache.

        Raises:
            RuntimeError: the session is not entered.
        """
        if self._key is None:
            raise RuntimeError("this session is not open: enter it with `with CacheSession(cache) as session:`")
        return self._key

    @property
    def control(self) -> Any:
        """The cache's control face."""
        return self._cache

    def __enter__(self) -> CacheSession:
        with _lock:
            if self._key is not None:
                raise RuntimeError("this session is open already; use activate() in other threads and tasks")
            self._key = f"cache-{next(_keys)}"
            _installed[self._key] = self._cache
        _active.set((*_active.get(), self._key))
        return self

    def __exit__(self, *_: object) -> None:
        key = self.key
        with _lock:
            _installed.pop(key, None)
            self._key = None
        _active.set(tuple(other for other in _active.get() if other != key))

    @contextmanager
    def activate(self) -> Iterator[CacheSession]:
        """Make this open session the active one in another thread or task."""
        before = _active.get()
        _active.set((*before, self.key))
        try:
            yield self
        finally:
            _active.set(before)


def active_key() -> str | None:
    """Return the key of the innermost active session of the calling context, or None."""
    keys = _active.get()
    return keys[-1] if keys else None


def installed_cache(key: str | None) -> Any | None:
    """Return the cache installed under a key, or None where its session has ended."""
    return None if key is None else _installed.get(key)


def active_cache() -> Any | None:
    """Return the cache of the innermost active session of the calling context.

    None where there is none, or where it has been left elsewhere: an outer session is never used in its stead.
    """
    return installed_cache(active_key())
