"""Many private histories on MLX."""

from __future__ import annotations

from collections.abc import Sequence

from executorch_mlx.extension.llm.cache.batch_sequence import BatchSequenceCache, SequencesPlan

from ..device import mx
from .base import MLXCache
from .sequence import MLXSequenceCache


class MLXBatchSequenceCache(BatchSequenceCache[MLXSequenceCache], MLXCache[SequencesPlan]):
    """The ``batched-sequence`` layout: each sequence's own cache answers its tokens."""

    sequence_type = MLXSequenceCache

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pools take."""
        return sum(cache.pool_bytes for cache in self._live.values())

    def release(self) -> list[mx.array]:
        """Return the pools written since the last call; see ``MLXCache.release``."""
        return [pool for cache in self._stepping.values() for pool in cache.release()]

    def _joined(self, parts: Sequence[mx.array]) -> mx.array:
        return mx.concatenate(list(parts), axis=2)
