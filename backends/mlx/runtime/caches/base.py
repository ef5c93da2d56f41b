"""What the delegate needs of a cache on MLX."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from executorch_mlx.extension.llm.cache.layout import CacheLayout, PlanT

from ..device import STREAM, exclusive, is_outermost, mx
from ..trace import TracedAttention


class MLXCache(CacheLayout[PlanT]):
    """The byte layer's face: ``attend``, and the arrays that a step has changed.

    Pools are written in place when they are evaluated, at the end of the step at the latest. Those of an aborted step
    are written, too: no layout reads what that wrote. Whoever calls ``attend`` inside ``exclusive()`` evaluates what it
    returns before the next step writes: an unevaluated result still holds the pool that it reads, and the write then
    copies that pool.
    """

    @abstractmethod
    def release(self) -> list[mx.array]:
        """Return the pools that were written since the last call, or what writes them: evaluate it with the outputs."""

    def traced(self, layers: Sequence[int], positions: tuple[int, ...]) -> TracedAttention | None:
        """Return a step's attention as a function of arrays; None where the step is not of that kind.

        Nothing changes until the result's ``commit``.

        Args:
            layers: the layers that the step asks, in order.
            positions: each token's position.
        """
        return None

    def attend(self, layer: int, positions: Any, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        """Append and attend; see ``CacheLayout.attend``. Lazy inside ``exclusive()``, as delegates call it."""
        with exclusive(), mx.stream(STREAM):
            out: mx.array = super().attend(layer, positions, q, k, v, scale)
            if is_outermost():
                # The caller holds no lock, and another thread may use the stream when it reads the result.
                self._evaluate([out])
            return out

    def _settle(self) -> None:
        self._evaluate([])

    def _discard(self) -> None:
        with suppress(Exception):
            self._evaluate([])

    def _evaluate(self, arrays: list[mx.array]) -> None:
        try:
            with exclusive(), mx.stream(STREAM):
                mx.eval(arrays, self.release())
        except Exception as error:
            self.mark_lost(f"{type(error).__name__}: {error}")
            raise
