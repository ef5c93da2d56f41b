"""What the delegate needs of a cache on MLX."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import suppress

from executorch_mlx.extension.llm.cache.layout import CacheLayout, PlanT

from ..device import STREAM, exclusive, mx


class MLXCache(CacheLayout[PlanT]):
    """The byte layer's face: ``attend``, and the arrays that a step has changed.

    ``attend`` is lazy: evaluate what it returns before the next step writes. An unevaluated result still holds the pool
    that it reads, and the write then copies that pool. Pools are written in place when they are evaluated, at the end
    of the step at the latest, and of an aborted one, too: no layout reads what that wrote.
    """

    @abstractmethod
    def release(self) -> list[mx.array]:
        """Return the pools that this step has written since the last call, to be evaluated with the outputs."""

    def _discard(self) -> None:
        with suppress(Exception):
            self._settle()

    def _settle(self) -> None:
        try:
            with exclusive(), mx.stream(STREAM):
                mx.eval(self.release())
        except BaseException as error:
            self.mark_lost(f"{type(error).__name__}: {error}")
            raise
